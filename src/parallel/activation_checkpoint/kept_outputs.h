#pragma once

// SelectiveOp: the choice of results that a layer's forward keeps, and their storage until the recompute.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ops/saved_outputs.h"
#include "titan/nn/hooks.h"
#include "titan/parallel/activation_checkpoint.h"

namespace titan::activations {

/// Every second product of one layer. [Note: every second product]
/// TorchTitan counts the products of a layer as they run and keeps the 1st, 3rd, 5th and so on. Here modules
/// have the numbers, given in the order in which the layer's first forward calls them, so that a forward that
/// takes another path keeps the same results as every other one. A weight identifies its module: it stays the
/// same tensor object.
class ProductChoice {
 public:
  /// Throws Error when a name of the policy matches a module without a product.
  ProductChoice(const nn::AnyRef& layer, const SelectiveOp& policy);
  bool keeps(const at::Tensor& weight);

 private:
  struct Product {
    const c10::TensorImpl* weight;
    bool recomputed;  // by name: takes no number
    int number = -1;  // none yet
  };
  std::vector<Product> products_;
  int num_numbered_ = 0;
};

/// The results that one forward of a layer kept.
class KeptOutputs final : public ops::SavedOutputs {
 public:
  /// `module`: its name. `num_saved`: of tensors that autograd has saved in this forward so far. Both outlive
  /// this.
  KeptOutputs(std::shared_ptr<ProductChoice> products, const std::string& module, const size_t& num_saved)
      : products_(std::move(products)), module_(module), num_saved_(num_saved) {}

  Action next(ops::KeptKind kind, const at::Tensor& weight) override;
  void keep(const at::Tensor& output) override;
  at::Tensor hand_back() override;

  /// The forward is over, and the recompute will stop at its last saved tensor: what was kept after that one
  /// would never be asked for.
  void drop_unreachable();
  /// Around a recompute. One may run in the middle of the forward, for a backward that the module holds:
  /// after it, the forward's results are kept again.
  void start_handing_back();
  void stop_handing_back() { handing_back_ = false; }

 private:
  /// The operation that gave a result.
  struct Source {
    ops::KeptKind kind;
    const c10::TensorImpl* weight;
    friend bool operator==(const Source&, const Source&) = default;
  };
  struct Kept {
    Source source;
    at::Tensor output;
    int64_t version;
    size_t num_saved;  // before it was computed
  };
  std::shared_ptr<ProductChoice> products_;
  const std::string& module_;
  const size_t& num_saved_;
  std::vector<Kept> kept_;
  Source asking_{};
  size_t next_ = 0;
  bool handing_back_ = false;
};

}  // namespace titan::activations
