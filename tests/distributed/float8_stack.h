#pragma once

// Feed-forward blocks in Float8, spread by FSDP and tensor parallelism, and compared with one rank.

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "distributed/float8_units.h"
#include "titan/core/error.h"
#include "titan/float8/convert.h"
#include "titan/nn/containers.h"
#include "titan/nn/layers.h"
#include "titan/parallel/activation_checkpoint.h"
#include "titan/parallel/fsdp.h"
#include "titan/parallel/parameters.h"
#include "titan/parallel/tensor_parallel.h"

namespace titan::testing::stack {

// Parts for 2 and 4 ranks are whole blocks of 32 features.
inline constexpr int64_t kDim = 32, kHidden = 128, kRows = 8, kLength = 16;
inline constexpr int kBlocks = 3;

inline nn::Construct deferred_here() { return deferred(device(), at::kFloat); }

// `mixed`: also has a norm, and a linear layer in high precision.
class StackBlockImpl : public nn::Module {
 public:
  explicit StackBlockImpl(bool mixed) {
    const nn::Init init = nn::Init::truncated_normal(0.2, -2, 2);
    if (mixed) {
      norm = nn::RMSNorm(kDim, 1e-5, deferred_here());
      register_module("norm", norm.ptr());
    }
    feed_forward = nn::FeedForward(nn::FeedForwardOptions{.dim = kDim,
                                                          .hidden_dim = kHidden,
                                                          .gate_init = init,
                                                          .output_init = init,
                                                          .construct = deferred_here()});
    register_module("feed_forward", feed_forward.ptr());
    if (mixed) {
      plain = nn::Linear(kDim, kDim, nn::LinearOptions{.construct = deferred_here()});
      register_module("plain", plain.ptr());
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    check_entered_through_ref();
    if (norm.is_empty()) return x + feed_forward(x);
    const at::Tensor h = x + feed_forward(norm(x));
    return h + plain(h);
  }
  nn::RMSNorm norm{nullptr};
  nn::FeedForward feed_forward{nullptr};
  nn::Linear plain{nullptr};
};
TITAN_MODULE(StackBlock);

class StackImpl : public nn::Module {
 public:
  explicit StackImpl(bool mixed) {
    for (int i = 0; i < kBlocks; ++i) blocks.push_back(StackBlock(mixed));
    register_module("blocks", blocks.ptr());
  }
  at::Tensor forward(const at::Tensor& x) {
    check_entered_through_ref();
    at::Tensor h = x;
    for (const StackBlock& block : blocks) {
      h = block(h);
      if (after_block) after_block(h);
    }
    return h;
  }
  nn::ModuleList<StackBlock> blocks;
  std::function<void(const at::Tensor&)> after_block;  ///< called with its output
};
TITAN_MODULE(Stack);

inline const Colwise kColumns{.input = ActivationLayout::replicate()};
inline const TensorPlan kPlan = {
    {"blocks.*.feed_forward.w1", kColumns},
    {"blocks.*.feed_forward.w3", kColumns},
    {"blocks.*.feed_forward.w2", Rowwise{}},
    {"blocks.*.feed_forward", PrepareInput{ActivationLayout::invariant(), ActivationLayout::replicate()}}};
// Only the first of each group's weights is split.
inline const TensorPlan kFirstWeightAlone = {
    {"blocks.*.feed_forward.w1", Colwise{.output = ActivationLayout::invariant()}}};

// For a block with a norm; the residual stream is split along the sequence.
inline TensorPlan sequence_plan() {
  const auto sequence = ActivationLayout::shard(1), whole = ActivationLayout::invariant();
  const Colwise columns{.input = sequence, .overlap = true};
  return {{"", PrepareInput{whole, sequence}},
          {"", PrepareOutput{sequence, whole}},
          {"blocks.*.norm", SequenceParallel{}},
          {"blocks.*.plain", SequenceParallel{}},
          {"blocks.*.feed_forward.w1", columns},
          {"blocks.*.feed_forward.w3", columns},
          {"blocks.*.feed_forward.w2", Rowwise{.output = sequence, .overlap = true}}};
}

struct StackLayout {
  int replicate = 1, shard = 1, tp = 1;
  TensorPlan plan = kPlan;
  OverlapTransport transport = OverlapTransport::AtOnce;
};

inline std::vector<StackLayout> layouts() {
  const int size = world().size();
  std::vector<StackLayout> all = {{.shard = size}};
  if (size == 2 || size == 4) all.push_back({.tp = size});
  if (size == 4) all.insert(all.end(), {{.shard = 2, .tp = 2}, {.replicate = 2, .shard = 2}});
  return all;
}

// "delayed": tensorwise with all three scales from the previous step.
inline const std::vector<std::string> kRecipes = {"tensorwise", "rowwise", "rowwise_with_gw_hp",
                                                  "mxfp8_cublas", "delayed"};

struct Case {
  std::string recipe = "tensorwise";
  StackLayout layout = {};
  float8::GatherOptions gather = {};
  FsdpOptions fsdp = {};
  bool mixed = false;
  bool frozen = false;  ///< some weights of two blocks, and all of the last block
  std::optional<LayersPolicy> checkpoint = std::nullopt;
  std::optional<float8::Arithmetic> arithmetic = std::nullopt;  ///< unset: arithmetic_of(recipe)
};

struct Spread {
  Stack model;
  DeviceMesh data;
};

inline float8::Arithmetic arithmetic_of(const Case& c) {
  return c.arithmetic.value_or(testing::arithmetic_of(c.recipe));
}

inline void convert(Stack& model, const Case& c, const float8::GatherOptions& gather = {}) {
  const bool delayed = c.recipe == "delayed";
  float8::convert(*model.ptr(), {.recipe_name = delayed ? "tensorwise" : c.recipe,
                                 .filter_fqns = {"plain"},
                                 .arithmetic = arithmetic_of(c),
                                 .plain = ops::default_products(),
                                 .delayed = {.input = delayed, .weight = delayed, .grad_output = delayed},
                                 .gather = gather});
}

inline void freeze(Stack& model) {
  model->blocks[0]->feed_forward->w1->weight.set_requires_grad(false);
  model->blocks[1]->feed_forward->w2->weight.set_requires_grad(false);
  for (at::Tensor& parameter : model->blocks[kBlocks - 1]->parameters()) parameter.set_requires_grad(false);
}

inline Spread make(const Case& c) {
  Stack model(c.mixed);
  if (c.frozen) freeze(model);
  convert(model, c, c.gather);
  const auto mesh = DeviceMesh::create(
      world(), {{"dp_replicate", c.layout.replicate}, {"dp_shard", c.layout.shard}, {"tp", c.layout.tp}});
  parallelize(model, mesh["tp"], c.layout.plan, c.layout.transport);
  if (c.checkpoint) checkpoint_activations({model->blocks.begin(), model->blocks.end()}, *c.checkpoint);
  FsdpOptions options = c.fsdp;
  options.mesh = mesh({"dp_replicate", "dp_shard"});
  for (const StackBlock& block : model->blocks) fully_shard(block, options);
  fully_shard(model, options);
  materialize(model, 7);
  return {model, options.mesh};
}

inline at::Tensor global_batch() {
  at::manual_seed(11);
  return at::randn({kRows, kLength, kDim}).to(device());
}

inline at::Tensor loss_of(const Stack& model, const at::Tensor& x) { return model(x).pow(2).sum(); }

// The second step gathers in the first one's order, and with delayed scales uses its magnitudes.
inline constexpr int kSteps = 2;

struct Outcome {
  double loss = 0;                              // over all ranks
  std::map<std::string, at::Tensor> gradients;  // whole; undefined for frozen parameters
};

// Each rank computes all ranks' micro-batches one by one, because activations are scaled per micro-batch.
inline Outcome one_ranks(const Case& c, int parts) {
  Stack model(c.mixed);
  if (c.frozen) freeze(model);
  convert(model, c);
  materialize(model, 7);
  auto scales = float8::DelayedScales::collect({model.ptr().get()}, 16, device());
  Outcome outcome;
  for (int step = 0; step < kSteps; ++step) {
    model->zero_grad();
    outcome.loss = 0;
    for (const at::Tensor& part : global_batch().chunk(parts)) {
      const at::Tensor loss = loss_of(model, part);
      loss.backward();
      outcome.loss += loss.item<double>();
    }
    if (!scales.empty()) scales.update([](const at::Tensor& /*pending*/) {});
  }
  for (const auto& named : model->named_parameters()) outcome.gradients[named.key()] = named.value().grad();
  return outcome;
}

inline Outcome spread_out(const Case& c) {
  const Spread spread = make(c);
  auto scales = float8::DelayedScales::collect({spread.model.ptr().get()}, 16, device());
  const int parts = c.layout.replicate * c.layout.shard;
  const auto mine = static_cast<size_t>(world().rank() / c.layout.tp);
  at::Tensor loss;
  for (int step = 0; step < kSteps; ++step) {
    for (const Parameter& parameter : parameters(spread.model)) parameter.data.local.mutable_grad().reset();
    loss = loss_of(spread.model, global_batch().chunk(parts)[mine]);
    loss.backward();
    if (!scales.empty())
      scales.update([](const at::Tensor& pending) {
        world().everyone()->all_reduce(pending, dist::ReduceOp::Max, {"test::scales"}).wait();
      });
  }
  at::Tensor sum = loss.detach().to(at::kDouble).view({1});
  world().everyone()->all_reduce(sum, dist::ReduceOp::Sum, {"test::loss"}).wait();
  Outcome outcome{sum.item<double>() / c.layout.tp, {}};
  for (const Parameter& parameter : parameters(spread.model)) {
    DTensor gradient = parameter.data;
    gradient.local = parameter.data.local.grad();
    outcome.gradients[parameter.name] = gradient.local.defined() ? full_tensor(gradient) : at::Tensor();
  }
  return outcome;
}

inline std::string name_of(const Case& c) {
  return str(c.recipe, " replicate ", c.layout.replicate, " shard ", c.layout.shard, " tp ", c.layout.tp,
             c.gather.in_float8 ? " gathered in Float8" : "", c.mixed ? " mixed" : "",
             c.frozen ? " frozen" : "");
}

inline double error_of(const at::Tensor& got, const at::Tensor& wanted) {
  return ((got - wanted).norm() / wanted.norm()).item<double>();
}

inline void expect_one_ranks(const Case& c) {
  SCOPED_TRACE(name_of(c));
  const Nearness nearness = nearness_of(arithmetic_of(c));
  const Outcome got = spread_out(c), wanted = one_ranks(c, c.layout.replicate * c.layout.shard);
  EXPECT_NEAR(got.loss, wanted.loss, nearness.loss * wanted.loss);
  for (const auto& [name, gradient] : got.gradients) {
    ASSERT_EQ(gradient.defined(), wanted.gradients.at(name).defined()) << name;
    if (!gradient.defined()) continue;
    EXPECT_LT(error_of(gradient, wanted.gradients.at(name)), nearness.gradients) << name;
  }
}

}  // namespace titan::testing::stack
