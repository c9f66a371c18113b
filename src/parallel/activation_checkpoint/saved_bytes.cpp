#include "parallel/activation_checkpoint/saved_bytes.h"

#include "titan/core/error.h"

namespace titan::activations {

class SavedBytes::Counter final : public SavedVariableHooks {
 public:
  explicit Counter(SavedBytes& counts) : counts_(counts) {}
  void call_pack_hook(const at::Tensor& tensor) override {
    if (!counts_.parameters_.contains(tensor)) counts_.bytes_.add(tensor);
  }
  at::Tensor call_unpack_hook() override {
    TITAN_INTERNAL_ASSERT(false, "a backward through a graph that only counts");
  }

 private:
  SavedBytes& counts_;
};

std::unique_ptr<SavedVariableHooks> SavedBytes::make() { return std::make_unique<Counter>(*this); }

}  // namespace titan::activations
