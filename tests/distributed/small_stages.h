#pragma once

// Stages unlike a Llama's, with at most one product each, and their results on one rank.

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "distributed/world.h"
#include "titan/core/error.h"
#include "titan/nn/layers.h"
#include "titan/nn/module.h"
#include "titan/parallel/fsdp.h"
#include "titan/parallel/parameters.h"
#include "train/pipeline/pipeline_runner.h"

namespace titan::testing {

inline constexpr int64_t kDim = 5;
enum class StageKind { Product, Tanh, Frozen, Identity, IgnoresInput };

inline const char* name_of(StageKind kind) {
  const char* names[] = {"product", "tanh", "frozen", "identity", "ignores its input"};
  return names[static_cast<size_t>(kind)];
}

class NothingImpl : public nn::Module {
 public:
  at::Tensor forward(const at::Tensor& x) { return x; }
};
TITAN_MODULE(Nothing);

inline at::Tensor weight_of(int stage) {
  at::manual_seed(static_cast<uint64_t>(stage) + 1);
  return at::randn({kDim, kDim}, at::kDouble) / 2;
}

inline at::Tensor function_of(StageKind kind, const std::function<at::Tensor(const at::Tensor&)>& product,
                              const at::Tensor& x) {
  if (kind == StageKind::Identity) return x;
  const at::Tensor y = product(kind == StageKind::IgnoresInput ? at::ones_like(x) : x);
  return kind == StageKind::Tanh ? y.tanh() : y;
}

inline at::Tensor loss_of(const at::Tensor& hidden) { return hidden.square().sum(); }

class SmallStage : public train::TrainableModel {
 public:
  SmallStage(StageKind kind, int stage) : kind_(kind) {
    if (kind == StageKind::Identity) {
      fully_shard(nothing_, {});
      return;
    }
    linear =
        nn::Linear(kDim, kDim, nn::LinearOptions{.construct = {.device = device(), .dtype = at::kDouble}});
    {
      const at::NoGradGuard no_grad;
      linear->weight.copy_(weight_of(stage));
    }
    if (kind == StageKind::Frozen) linear->weight.set_requires_grad(false);
    fully_shard(linear, {});
  }
  nn::AnyRef root() override { return linear ? nn::AnyRef(linear) : nn::AnyRef(nothing_); }
  at::Tensor hidden(const at::Tensor& input) override {
    const at::Tensor x = input.to(at::kDouble);
    if (kind_ == StageKind::Identity) return nothing_(x);
    const at::Tensor y = function_of(
        kind_, [&](const at::Tensor& of) { return linear(of); }, x);
    if (watch) watch(y);
    return y;
  }
  at::Tensor loss(const at::Tensor& input, const at::Tensor&, const ops::ValidTokens&) override {
    return loss_of(hidden(input));
  }

  nn::Linear linear{nullptr};
  std::function<void(const at::Tensor&)> watch;

 private:
  StageKind kind_;
  Nothing nothing_;
};

inline at::Tensor tokens_of(int micro_batch) {
  return at::arange(kDim).view({1, kDim}).add(micro_batch).remainder(4);
}

inline std::vector<data::Batch> micro_batches(int count) {
  std::vector<data::Batch> batches;
  for (int m = 0; m < count; ++m) batches.push_back({tokens_of(m), tokens_of(m), kDim});
  return batches;
}

struct Expected {
  double loss = 0;
  std::vector<at::Tensor> gradients;  // by stage; undefined: none
};

inline Expected on_one_rank(const std::vector<StageKind>& kinds, int count) {
  std::vector<at::Tensor> weights;
  for (size_t i = 0; i < kinds.size(); ++i)
    weights.push_back(weight_of(static_cast<int>(i)).set_requires_grad(kinds[i] != StageKind::Frozen));
  Expected expected;
  for (int m = 0; m < count; ++m) {
    at::Tensor x = tokens_of(m).to(at::kDouble);
    for (size_t i = 0; i < kinds.size(); ++i)
      x = function_of(
          kinds[i], [&](const at::Tensor& of) { return of.matmul(weights[i].t()); }, x);
    const at::Tensor loss = loss_of(x);
    if (loss.requires_grad()) loss.backward();
    expected.loss += loss.item<double>();
  }
  for (const at::Tensor& weight : weights) expected.gradients.push_back(weight.grad());
  return expected;
}

// Runs two steps, so that leftovers of the first one are detected. Calls in_first_step(true) when that begins, and with false when it has ended.
inline void expect_equals_one_rank(
    const DeviceMesh& pp, const pipeline::Schedule& schedule, const std::vector<StageKind>& kinds,
    const std::function<void(bool)>& in_first_step = [](bool) {}) {
  std::string name = schedule.name;
  for (const StageKind kind : kinds) name += str(", ", name_of(kind));
  std::vector<std::unique_ptr<SmallStage>> models;
  std::vector<train::Stage> stages;
  for (int stage = 0; stage < schedule.num_stages; ++stage) {
    if (schedule.rank_of_stage[static_cast<size_t>(stage)] != pp.rank()) continue;
    models.push_back(std::make_unique<SmallStage>(kinds[static_cast<size_t>(stage)], stage));
    stages.push_back({models.back().get(), stage});
  }
  train::PipelineRunner runner(stages, pp, device());
  const train::StepPlan plan =
      runner.plan(schedule, std::vector<train::TensorType>(kinds.size(), {{1, kDim}, at::kDouble}));
  double loss = 0;
  for (int step = 0; step < 2; ++step) {
    if (step == 0) in_first_step(true);
    for (const train::Stage& stage : stages)
      for (const Parameter& parameter : parameters(stage.model->root()))
        at::Tensor(parameter.data.local).mutable_grad().reset();
    loss = pp.group()->sum(runner.run(plan, micro_batches(schedule.num_micro_batches), 1).item<double>(),
                           {"test::loss"});
    if (step == 0) in_first_step(false);
  }
  const Expected expected = on_one_rank(kinds, schedule.num_micro_batches);
  EXPECT_NEAR(loss, expected.loss, 1e-12 * expected.loss) << name;
  for (size_t i = 0; i < stages.size(); ++i) {
    const auto list = parameters(stages[i].model->root());
    if (list.empty()) continue;
    const at::Tensor& gradient = expected.gradients[static_cast<size_t>(stages[i].index)];
    const at::Tensor& on_device = list[0].data.local.grad();
    if (!list[0].data.local.requires_grad()) {
      EXPECT_FALSE(on_device.defined()) << name;
      continue;
    }
    ASSERT_TRUE(on_device.defined()) << name << ", stage " << stages[i].index;
    const at::Tensor got = on_device.cpu();
    const at::Tensor wanted =
        gradient.defined() ? gradient : at::zeros_like(got);  // before a stage that ignores its input
    EXPECT_LE((got - wanted).norm().item<double>(), 1e-12 * std::max(1.0, wanted.norm().item<double>()))
        << name << ", stage " << stages[i].index;
  }
}

}  // namespace titan::testing
