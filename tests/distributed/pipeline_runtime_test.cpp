// Stages unlike a Llama's, on two pipeline ranks, against the same products on one: frozen ones, ones without
// parameters, ones that don't use their input or whose backward reads what they have sent; and that what was
// sent doesn't stay.

#include <algorithm>
#include <functional>
#include <optional>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "distributed/world.h"
#include "titan/nn/linear.h"
#include "titan/nn/module.h"
#include "titan/nn/ref.h"
#include "titan/parallel/fsdp.h"
#include "titan/parallel/parameters.h"
#include "titan/parallel/pipeline_completion.h"
#include "titan/parallel/pipeline_generators.h"
#include "titan/train/parallel_dims.h"
#include "titan/train/step_runner.h"

namespace titan {
namespace {

using testing::world;

constexpr int64_t kDim = 5;
constexpr int kMicroBatches = 4;

enum class Kind { Product, Tanh, Frozen, Identity, IgnoresInput };

const char* name_of(Kind kind) {
  const char* names[] = {"product", "tanh", "frozen", "identity", "ignores its input"};
  return names[static_cast<size_t>(kind)];
}

class NothingImpl : public nn::Module {
 public:
  at::Tensor forward(const at::Tensor& x) { return x; }
};
TITAN_MODULE(Nothing);

at::Tensor weight_of(int stage) {
  at::manual_seed(static_cast<uint64_t>(stage) + 1);
  return at::randn({kDim, kDim}, at::kDouble) / 2;
}

at::Tensor function_of(Kind kind, const std::function<at::Tensor(const at::Tensor&)>& product,
                       const at::Tensor& x) {
  if (kind == Kind::Identity) return x;
  const at::Tensor y = product(kind == Kind::IgnoresInput ? at::ones_like(x) : x);
  return kind == Kind::Tanh ? y.tanh() : y;
}

at::Tensor loss_of(const at::Tensor& hidden) { return hidden.square().sum(); }

class SmallStage : public train::TrainableModel {
 public:
  SmallStage(Kind kind, int stage) : kind_(kind) {
    if (kind == Kind::Identity) {
      fully_shard(nothing_, {});
      return;
    }
    linear = nn::Linear(kDim, kDim, nn::LinearOptions{.construct = {.dtype = at::kDouble}});
    {
      const at::NoGradGuard no_grad;
      linear->weight.copy_(weight_of(stage));
    }
    if (kind == Kind::Frozen) linear->weight.set_requires_grad(false);
    fully_shard(linear, {});
  }
  nn::AnyRef root() override { return linear ? nn::AnyRef(linear) : nn::AnyRef(nothing_); }
  at::Tensor hidden(const at::Tensor& input) override {
    const at::Tensor x = input.to(at::kDouble);
    if (kind_ == Kind::Identity) return nothing_(x);
    const at::Tensor y = function_of(
        kind_, [&](const at::Tensor& of) { return linear(of); }, x);
    if (watch) watch(y);
    return y;
  }
  at::Tensor loss(const at::Tensor& input, const at::Tensor&, int64_t) override {
    return loss_of(hidden(input));
  }

  nn::Linear linear{nullptr};
  std::function<void(const at::Tensor&)> watch;

 private:
  Kind kind_;
  Nothing nothing_;
};

at::Tensor tokens_of(int micro_batch) {
  return at::arange(kDim).view({1, kDim}).add(micro_batch).remainder(4);
}

std::vector<data::Batch> micro_batches(int count) {
  std::vector<data::Batch> batches;
  for (int m = 0; m < count; ++m) batches.push_back({tokens_of(m), tokens_of(m), kDim});
  return batches;
}

struct Expected {
  double loss = 0;
  std::vector<at::Tensor> gradients;  // by stage; undefined: none
};

Expected on_one_rank(const std::vector<Kind>& kinds, int count) {
  std::vector<at::Tensor> weights;
  for (size_t i = 0; i < kinds.size(); ++i)
    weights.push_back(weight_of(static_cast<int>(i)).set_requires_grad(kinds[i] != Kind::Frozen));
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

pipeline::Schedule schedule_of(const std::string& name, size_t num_stages, int count) {
  return pipeline::with_parameter_actions(
      pipeline::with_communication(pipeline::make_schedule(name, 2, static_cast<int>(num_stages), count)));
}

struct RuntimeCase {
  const char* schedule;
  std::vector<Kind> kinds;
};

std::string name_of(const RuntimeCase& test) {
  std::string name = test.schedule;
  for (const Kind kind : test.kinds) name += str(", ", name_of(kind));
  return name;
}

// Two steps: what the first one leaves must not show in the second.
void expect_equals_one_rank(const RuntimeCase& test) {
  const DeviceMesh pp = train::build_meshes(world(), {.pp = 2}).pp;
  const pipeline::Schedule schedule = schedule_of(test.schedule, test.kinds.size(), kMicroBatches);
  std::vector<std::unique_ptr<SmallStage>> models;
  std::vector<train::Stage> stages;
  for (int stage = 0; stage < schedule.num_stages; ++stage) {
    if (schedule.rank_of_stage[static_cast<size_t>(stage)] != pp.rank()) continue;
    models.push_back(std::make_unique<SmallStage>(test.kinds[static_cast<size_t>(stage)], stage));
    stages.push_back({models.back().get(), stage});
  }
  train::StepRunner runner(stages, pp, at::kCPU);
  const train::StepPlan plan =
      runner.plan(schedule, std::vector<train::TensorType>(test.kinds.size(), {{1, kDim}, at::kDouble}));
  double loss = 0;
  for (int step = 0; step < 2; ++step) {
    for (const train::Stage& stage : stages)
      for (const Parameter& parameter : parameters(stage.model->root()))
        at::Tensor(parameter.data.local).mutable_grad().reset();
    loss = pp.group()->sum(runner.run(plan, micro_batches(kMicroBatches), 1).item<double>(), {"test::loss"});
  }
  const Expected expected = on_one_rank(test.kinds, kMicroBatches);
  EXPECT_NEAR(loss, expected.loss, 1e-12 * expected.loss) << name_of(test);
  for (size_t i = 0; i < stages.size(); ++i) {
    const auto list = parameters(stages[i].model->root());
    if (list.empty()) continue;
    const at::Tensor& gradient = expected.gradients[static_cast<size_t>(stages[i].index)];
    const at::Tensor& got = list[0].data.local.grad();
    if (!list[0].data.local.requires_grad()) {
      EXPECT_FALSE(got.defined()) << name_of(test);
      continue;
    }
    ASSERT_TRUE(got.defined()) << name_of(test) << ", stage " << stages[i].index;
    const at::Tensor wanted =
        gradient.defined() ? gradient : at::zeros_like(got);  // in front of one that ignores
    EXPECT_LE((got - wanted).norm().item<double>(), 1e-12 * std::max(1.0, wanted.norm().item<double>()))
        << name_of(test) << ", stage " << stages[i].index;
  }
}

TEST(PipelineRuntime, StagesOfAnyKindEqualOneRank) {
  using enum Kind;
  for (const std::vector<Kind>& kinds : {std::vector{Tanh, Product},
                                         {Frozen, Product},
                                         {Product, Frozen},
                                         {Identity, Product},
                                         {Product, Identity},
                                         {Product, IgnoresInput}})
    expect_equals_one_rank({"1F1B", kinds});
  for (const std::vector<Kind>& kinds : {std::vector{Product, Tanh, Tanh, Product},
                                         {Frozen, Product, Identity, Tanh},
                                         {Tanh, IgnoresInput, Frozen, Product},
                                         {Product, Identity, Frozen, Frozen}}) {
    expect_equals_one_rank({"ZBVZeroBubble", kinds});
    expect_equals_one_rank({"Interleaved1F1B", kinds});
  }
}

// gloo doesn't tell by itself that a message has arrived.
TEST(PipelineRuntime, WhatWasSentGoesWhileTheStepGoesOn) {
  constexpr int kMany = 32;
  const DeviceMesh pp = train::build_meshes(world(), {.pp = 2}).pp;
  SmallStage stage(Kind::Product, pp.rank());
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> outputs;
  size_t most = 0;
  stage.watch = [&](const at::Tensor& output) {
    const auto alive =
        std::count_if(outputs.begin(), outputs.end(), [](const auto& o) { return !o.expired(); });
    most = std::max(most, static_cast<size_t>(alive));
    outputs.push_back(output.storage().getWeakStorageImpl());
  };
  train::StepRunner runner({{&stage, pp.rank()}}, pp, at::kCPU);
  const train::StepPlan plan = runner.plan(schedule_of("GPipe", 2, kMany),
                                           std::vector<train::TensorType>(2, {{1, kDim}, at::kDouble}));
  runner.run(plan, micro_batches(kMany), 1);
  ASSERT_EQ(outputs.size(), size_t{kMany});
  if (pp.rank() == 0) EXPECT_LE(most, 6u);
}

}  // namespace
}  // namespace titan
