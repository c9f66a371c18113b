#pragma once

// Splittable: a module whose weights can be cut for tensor parallelism (Shoeybi et al., "Megatron-LM", 2019).

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "titan/nn/module.h"
#include "titan/ops/linear.h"
#include "titan/ops/products.h"

namespace titan::nn {

enum class Split {
  Columns,  ///< by what comes out: each rank computes a part of the features (of the logits)
  Rows,     ///< by what goes in: each rank has a part of the features (of the tokens) and gives a summand
};

/// How one parameter follows a split of its module.
struct ParamSplit {
  std::string name;                  ///< within the module
  int64_t dim = -1;                  ///< the dimension that is cut; -1: every rank keeps it whole
  bool gradient_is_summand = false;  ///< of a whole one: each rank's gradient is a part of the sum
};

/// A module that says how. Modules that don't are cut as torch.nn.Linear: weight [out, in], bias [out].
class Splittable {
 public:
  virtual ~Splittable() = default;
  /// Throws Error for a split that the module doesn't know.
  virtual std::vector<ParamSplit> param_splits(Split split) const = 0;
  /// The parameters are this rank's parts from now on.
  virtual void set_split(Split split, std::shared_ptr<const ops::RankParts> parts) = 0;
};

struct LinearOptions {
  bool bias = false;
  std::optional<Init> init = std::nullopt;  ///< of the weight; default: uniform in +-1/sqrt(in), as the bias
                                            ///< is drawn (torch.nn.Linear's)
  Construct construct = {};
};

/// A module whose matrix products can be exchanged (Float8, fused communication).
class ProductsUser {
 public:
  virtual ~ProductsUser() = default;
  virtual void set_products(std::shared_ptr<const ops::Products> products) = 0;
};

/// Gives all modules at and below `root` that multiply by a weight these products.
void set_products(torch::nn::Module& root, const std::shared_ptr<const ops::Products>& products);

class Linear;

/// y = x W^T + b. x: [..., in]; weight: [out, in]; bias: [out], undefined without; y: [..., out].
class LinearImpl : public Module, public ProductsUser, public Splittable {
 public:
  LinearImpl(int64_t in_features, int64_t out_features, const LinearOptions& options = {});
  at::Tensor forward(const at::Tensor& x);

  void set_products(std::shared_ptr<const ops::Products> products) override;
  const std::shared_ptr<const ops::Products>& products() const { return products_; }
  /// Who has the weight's values from now on, in place of the parameter; null: the parameter again.
  void set_weight_source(std::shared_ptr<const ops::WeightSource> source) {
    weight_source_ = std::move(source);
  }
  bool set_grad_sink(std::string_view name, std::shared_ptr<ops::GradSink> sink) override;
  /// Columns cut weight and bias; rows cut the weight, and one rank adds the bias.
  std::vector<ParamSplit> param_splits(Split split) const override;
  void set_split(Split split, std::shared_ptr<const ops::RankParts> parts) override;
  /// Of a split layer: its sequence is gathered (columns), or its result summed and scattered (rows), while
  /// it multiplies. x: [B, S, in]. Not with a bias.
  void set_exchange(Split split, std::shared_ptr<const ops::SequenceExchange> exchange);

  at::Tensor weight, bias;

 private:
  /// Whether the two may be computed together: nothing of its own is around either.
  bool joins(const LinearImpl& other) const;
  ops::SinkedWeight sinked_weight() const { return {weight, weight_sink_, weight_source_}; }

  std::shared_ptr<const ops::Products> products_;  // for `parts_`
  ops::SpreadFeatures parts_;
  std::shared_ptr<ops::GradSink> weight_sink_;
  std::shared_ptr<const ops::WeightSource> weight_source_;
  bool adds_bias_ = true;  // of a sum over ranks, one adds it
  Split exchange_split_ = Split::Columns;
  std::shared_ptr<const ops::SequenceExchange> exchange_;

  friend std::vector<at::Tensor> linears(const at::Tensor& x, std::initializer_list<const Linear*> layers);
};
TITAN_MODULE(Linear);

/// Several layers of one input, as if called one after the other, but as one node where nothing is hooked
/// around them: their gradients are added up by the products, and an input that is gathered is gathered once.
std::vector<at::Tensor> linears(const at::Tensor& x, std::initializer_list<const Linear*> layers);

}  // namespace titan::nn
