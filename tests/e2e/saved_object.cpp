// A user's object that joins the checkpoints of `titan train`: it counts its saves in a tensor and in a text.

#include <memory>
#include <string>

#include <ATen/ATen.h>

#include "titan/core/error.h"
#include "titan/core/log.h"
#include "titan/train/trainer.h"

namespace {

class SaveCounter : public titan::checkpoint::Stateful {
 public:
  explicit SaveCounter(const titan::DeviceMesh& stage) : stage_(stage) {}

  titan::checkpoint::ObjectState state() override {
    count_.add_(1);
    titan::DTensor whole{.local = count_,
                         .mesh = stage_,
                         .placements = std::vector<titan::Placement>(static_cast<size_t>(stage_.num_axes())),
                         .global_shape = {3},
                         .box = {{0}, {3}}};
    return {.tensors = {{"count", whole}}, .text = std::to_string(count_[0].item<int64_t>())};
  }

  void loaded(const std::string& text) override {
    titan::log::info_rank0("the counter stood at " + text + ", and in its tensor at " +
                           std::to_string(count_[2].item<int64_t>()));
  }

 private:
  titan::DeviceMesh stage_;
  at::Tensor count_ = at::zeros({3}, at::kLong);
};

}  // namespace

extern "C" void titan_register() {
  titan::train::saved_objects().add("save_counter", [](titan::train::TrainerParts& parts) {
    return std::make_unique<SaveCounter>(parts.meshes.stage);
  });
}
