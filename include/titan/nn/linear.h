#pragma once

// Linear layers, and the interfaces by which wrappers reach into a layer with a weight: tensor parallelism
// cuts it, Float8 exchanges its products.
//
//   nn::Linear linear(in, out, nn::LinearOptions{.bias = true});
//   at::Tensor y = linear(x);

#include <initializer_list>

#include "titan/nn/module.h"
#include "titan/ops/linear.h"

namespace titan::nn {

/// How tensor parallelism cuts a module's weights (Shoeybi et al., "Megatron-LM", 2019).
enum class Split {
  Columns,  ///< by output: each rank computes a part of the features (of the logits)
  Rows,     ///< by input: each rank has a part of the features (of the tokens) and computes a summand
};

/// How one parameter follows a split of its module.
struct ParamSplit {
  std::string name;                  ///< within the module
  int64_t dim = -1;                  ///< the dimension that is cut; -1: every rank keeps it whole
  bool gradient_is_summand = false;  ///< for a whole one: each rank's gradient is a part of the sum
};

/// A module that says how it is cut. Others are cut as torch.nn.Linear: weight [out, in], bias [out].
class Splittable {
 public:
  virtual ~Splittable() = default;
  /// Throws Error for a split that the module doesn't support.
  virtual std::vector<ParamSplit> param_splits(Split split) const = 0;
  /// From now on the parameters are this rank's parts.
  virtual void set_split(Split split, std::shared_ptr<const ops::RankParts> parts) = 0;
};

/// A module whose matrix products can be exchanged (Float8, fused communication).
class ProductsUser {
 public:
  virtual ~ProductsUser() = default;
  virtual void set_products(ops::SharedProducts products) = 0;
};

/// Gives these products to all modules at and below `root` that multiply by a weight.
void set_products(torch::nn::Module& root, const ops::SharedProducts& products);

/// A module with a parameter "weight" whose gradient a sink may take.
class WeightedModule : public Module {
 public:
  bool set_grad_sink(std::string_view name, std::shared_ptr<ops::GradSink> sink) override;

  at::Tensor weight;

 protected:
  std::shared_ptr<ops::GradSink> weight_sink_;
};

struct LinearOptions {
  bool bias = false;
  /// The weight's initial values; default: uniform in +-1/sqrt(in), as is the bias (torch.nn.Linear's).
  std::optional<Init> init = std::nullopt;
  Construct construct = {};
};

class Linear;

/// y = x W^T + b. x: [..., in]; weight: [out, in]; bias: [out], undefined without; y: [..., out].
class LinearImpl : public WeightedModule, public ProductsUser, public Splittable {
 public:
  LinearImpl(int64_t in_features, int64_t out_features, const LinearOptions& options = {});
  at::Tensor forward(const at::Tensor& x);

  void set_products(ops::SharedProducts products) override;
  const ops::SharedProducts& products() const { return products_; }
  /// Where the weight's values come from, in place of the parameter; null: the parameter again.
  void set_weight_source(std::shared_ptr<const ops::WeightSource> source) {
    weight_source_ = std::move(source);
  }
  /// Columns cut weight and bias; rows cut the weight, and one rank adds the bias.
  std::vector<ParamSplit> param_splits(Split split) const override;
  void set_split(Split split, std::shared_ptr<const ops::RankParts> parts) override;
  /// For a split layer: gathers its sequence (columns), or sums and scatters its result (rows), while it
  /// multiplies. x: [B, S, in]. Not with a bias.
  void set_exchange(Split split, std::shared_ptr<const ops::SequenceExchange> exchange);

  at::Tensor bias;

 private:
  /// Whether the two may be computed together: neither has a hook of its own.
  bool joins(const LinearImpl& other) const;
  ops::SinkedWeight sinked_weight() const { return {weight, weight_sink_, weight_source_}; }

  ops::SharedProducts products_;  // for `parts_`
  ops::SpreadFeatures parts_;
  std::shared_ptr<const ops::WeightSource> weight_source_;
  bool adds_bias_ = true;  // in a sum over ranks, one adds it
  Split exchange_split_ = Split::Columns;
  std::shared_ptr<const ops::SequenceExchange> exchange_;

  friend std::vector<at::Tensor> linears(const at::Tensor& x, std::initializer_list<const Linear*> layers);
};
TITAN_MODULE(Linear);

/// Several layers of one input, as if called one after the other, but as one node where nothing is hooked
/// around them: the products add up their gradients, and an input that is gathered is gathered once.
std::vector<at::Tensor> linears(const at::Tensor& x, std::initializer_list<const Linear*> layers);

}  // namespace titan::nn
