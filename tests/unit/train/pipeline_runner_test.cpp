// The pipeline runner on one rank, while the `fake` backend plays the others: its memory and its errors.
// Numbers are compared in tests/distributed/pipeline*_test.cpp.

#include <functional>
#include <set>

#include <gtest/gtest.h>

#include "job/pipeline_stages.h"
#include "titan/core/error.h"
#include "titan/nn/layers.h"
#include "titan/parallel/fsdp.h"
#include "titan/parallel/pipeline_schedule.h"
#include "train/pipeline/pipeline_runner.h"

namespace titan::train {
namespace {

using Function = std::function<at::Tensor(const at::Tensor&)>;
using Kind = pipeline::Action::Kind;

constexpr int64_t kDim = 4;

// A product and the operation after it.
class ProductStage : public TrainableModel {
 public:
  explicit ProductStage(Function after) : linear(kDim, kDim), after_(std::move(after)) {}
  nn::AnyRef root() override { return linear; }
  at::Tensor hidden(const at::Tensor& input) override { return after_(linear(input.to(at::kFloat))); }
  at::Tensor loss(const at::Tensor& input, const at::Tensor&, const ops::ValidTokens&) override {
    return hidden(input).sum();
  }

  nn::Linear linear;

 private:
  Function after_;
};

at::Tensor unchanged(const at::Tensor& x) { return x; }

std::vector<data::Batch> micro_batches(int count) {
  const at::Tensor tokens = at::ones({1, kDim}, at::kLong);
  return std::vector<data::Batch>(static_cast<size_t>(count), {tokens, tokens, kDim});
}

std::vector<TensorType> boundaries() { return std::vector<TensorType>(2, {{1, kDim}, at::kFloat}); }

pipeline::Schedule complete(const pipeline::Schedule& schedule) {
  return pipeline::with_parameter_actions(pipeline::with_communication(schedule));
}

pipeline::Schedule one_forward_one_backward(int count) {
  return complete(pipeline::make_schedule("1F1B", 2, 2, count));
}

// Rank `rank` of two.
PipelineRunner runner_of(ProductStage& stage, int rank) {
  const dist::World world = dist::init({.backend = "fake", .fake_rank = rank, .fake_world_size = 2});
  return PipelineRunner({{&stage, rank}}, DeviceMesh::create(world, {{"pp", 2}})["pp"], at::kCPU);
}

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != text.npos; }

// The backward of tanh reads its output, so a send must not look like a write to it.
TEST(PipelineRunner, BackwardMayReadASentTensor) {
  ProductStage stage([](const at::Tensor& x) { return x.tanh(); });
  PipelineRunner runner = runner_of(stage, 0);
  runner.run(runner.plan(one_forward_one_backward(3), boundaries()), micro_batches(3), 1);
  EXPECT_TRUE(stage.linear->weight.grad().defined());
}

TEST(PipelineRunner, LibTorchErrorsNameTheActionAndEndThePipeline) {
  int calls = 0;
  ProductStage stage([&](const at::Tensor& x) {
    TORCH_CHECK(calls++ != 1, "no memory left");
    return x;
  });
  PipelineRunner runner = runner_of(stage, 0);
  const StepPlan plan = runner.plan(one_forward_one_backward(2), boundaries());
  const auto run = [&] { runner.run(plan, micro_batches(2), 1); };
  const std::string message = message_of(run);
  EXPECT_TRUE(contains(message, "in action 0F1 (")) << message;
  EXPECT_TRUE(contains(message, "of pipeline rank 0: no memory left")) << message;
  const std::string next = message_of(run);
  EXPECT_TRUE(contains(next, "a step of this pipeline has failed")) << next;
}

TEST(PipelineRunner, RefusesAScheduleThatCannotRun) {
  ProductStage stage(unchanged);
  PipelineRunner runner = runner_of(stage, 0);
  pipeline::Schedule schedule = one_forward_one_backward(2);
  std::erase(schedule.ranks[0], pipeline::Action{Kind::Backward, 0, 1});
  EXPECT_THROW(runner.plan(schedule, boundaries()), ConfigError);
}

// Records where received tensors are in memory, and at once takes memory that is released.
class WatchedStage : public ProductStage {
 public:
  WatchedStage() : ProductStage(unchanged) {}
  at::Tensor loss(const at::Tensor& input, const at::Tensor& labels, const ops::ValidTokens& count) override {
    places.insert(input.data_ptr());
    for (int i = 0; i < 4; ++i)
      others_.push_back(at::empty_like(input, input.options().requires_grad(false)));
    return ProductStage::loss(input, labels, count);
  }

  std::set<const void*> places;

 private:
  std::vector<at::Tensor> others_;
};

// One buffer is in use while the next message arrives in another.
TEST(PipelineRunner, ReusesReceiveBuffers) {
  WatchedStage stage;
  PipelineRunner runner = runner_of(stage, 1);
  runner.run(runner.plan(one_forward_one_backward(8), boundaries()), micro_batches(8), 1);
  EXPECT_EQ(stage.places.size(), 2u);
}

TEST(PipelineRunner, KeepsEveryInputUntilItsBackward) {
  WatchedStage stage;
  PipelineRunner runner = runner_of(stage, 1);
  runner.run(runner.plan(complete(pipeline::make_schedule("GPipe", 2, 2, 8)), boundaries()), micro_batches(8),
             1);
  EXPECT_EQ(stage.places.size(), 8u);
}

TEST(PipelineRunner, EvaluationDropsAnInputAfterItsForward) {
  WatchedStage stage;
  PipelineRunner runner = runner_of(stage, 1);
  const StepPlan plan = runner.plan(complete(pipeline::make_forward_only_schedule({0, 1}, 8)), boundaries());
  const at::NoGradGuard no_grad;
  runner.run(plan, micro_batches(8), 1);
  EXPECT_EQ(stage.places.size(), 2u);
}

TEST(ReceiveBuffers, AreReusedWhenNothingHoldsThem) {
  const TensorType type{{2, 3}, at::kFloat};
  ReceiveBuffers buffers(at::kCPU);
  at::Tensor first = buffers.take(type), second = buffers.take(type);
  const void* place = first.data_ptr();
  EXPECT_NE(second.data_ptr(), place);
  EXPECT_EQ(second.sizes(), at::IntArrayRef({2, 3}));

  at::Tensor view = first.view(-1);
  first.reset();
  EXPECT_NE(buffers.take(type).data_ptr(), place);
  view.reset();
  EXPECT_EQ(buffers.take(type).data_ptr(), place);
  EXPECT_NE(buffers.take({{3, 2}, at::kFloat}).data_ptr(), place);
  EXPECT_NE(buffers.take({{2, 3}, at::kBFloat16}).data_ptr(), place);
}

// Afterwards they have no traces of autograd.
TEST(ReceiveBuffers, AreNotReusedWhileAGraphHoldsThem) {
  const TensorType type{{4}, at::kFloat};
  ReceiveBuffers buffers(at::kCPU);
  at::Tensor x = buffers.take(type);
  const void* place = x.data_ptr();
  at::Tensor y = x.set_requires_grad(true).square();
  x.reset();
  EXPECT_NE(buffers.take(type).data_ptr(), place);
  y.sum().backward();
  y.reset();
  const at::Tensor again = buffers.take(type);
  EXPECT_EQ(again.data_ptr(), place);
  EXPECT_FALSE(again.requires_grad());
  EXPECT_FALSE(again.grad().defined());
  EXPECT_EQ(again._version(), 0);
}

// Two stages on one rank, and two ranks that share the parameters: each stage's gradients are summed after
// its own last backward.
TEST(PipelineRunner, EachStageReducesOnceWithoutParameterActions) {
  const dist::World world = dist::init({.backend = "fake", .fake_rank = 0, .fake_world_size = 2});
  const FsdpOptions fsdp{.mesh = DeviceMesh::create(world, {{"dp", 2}}), .reduce_every_micro_batch = false};
  ProductStage first(unchanged), second(unchanged);
  for (ProductStage* stage : {&first, &second}) fully_shard(stage->linear, fsdp);
  pipeline::Schedule schedule{
      .name = "in a row", .num_stages = 2, .num_micro_batches = 2, .rank_of_stage = {0, 0}, .ranks = {{}}};
  for (const int m : {0, 1})
    for (const pipeline::Action& action : {pipeline::Action{Kind::Forward, 0, m},
                                           {Kind::Forward, 1, m},
                                           {Kind::Backward, 1, m},
                                           {Kind::Backward, 0, m}})
      schedule.ranks[0].push_back(action);
  PipelineRunner runner({{&first, 0}, {&second, 1}}, DeviceMesh(), at::kCPU);
  runner.run(runner.plan(schedule, boundaries()), micro_batches(2), 1);
  for (ProductStage* stage : {&first, &second})
    EXPECT_TRUE(parameters(stage->root())[0].data.local.grad().defined());
}

// ---- tied weights

std::vector<Parameter> two_copies(bool trainable) {
  std::vector<Parameter> copies(2);
  for (Parameter& copy : copies) {
    copy.name = "weight";
    copy.on_other_stages = true;
    copy.data.local = at::zeros({3}).set_requires_grad(trainable);
    if (trainable) copy.data.local.mutable_grad() = at::full({3}, &copy == copies.data() ? 1.0 : 2.0);
  }
  return copies;
}

TEST(TiedGradients, AreSummedInEachCopyAndCountedOnce) {
  std::vector<Parameter> copies = two_copies(true);
  TiedGradients(copies, DeviceMesh(), {{"weight", {0}}}).sum();
  EXPECT_FALSE(copies[0].duplicate);
  EXPECT_TRUE(copies[1].duplicate);
  for (const Parameter& copy : copies)
    EXPECT_TRUE(at::equal(copy.data.local.grad(), at::full({3}, 3.0))) << copy.data.local.grad();
}

TEST(TiedGradients, AreNotSummedForAFrozenParameter) {
  std::vector<Parameter> copies = two_copies(false);
  TiedGradients(copies, DeviceMesh(), {{"weight", {0}}}).sum();
  EXPECT_TRUE(copies[1].duplicate);
  EXPECT_FALSE(copies[0].data.local.grad().defined());
}

// ---- memory budget

std::optional<int64_t> share(std::optional<int64_t> bytes, const std::string& schedule, int rank) {
  ActivationCheckpointSettings settings;
  settings.memory_budget_bytes = bytes;
  share_memory_budget(settings, pipeline::make_schedule(schedule, 2, 2, 4), rank);
  return settings.memory_budget_bytes;
}

TEST(MemoryBudget, IsSharedByForwardsInFlight) {
  EXPECT_EQ(share(4000, "GPipe", 0), 1000);
  EXPECT_EQ(share(4000, "1F1B", 0), 2000);
  EXPECT_EQ(share(4000, "1F1B", 1), 4000);
  EXPECT_EQ(share({}, "GPipe", 0), std::nullopt);  // a fraction is the same for each
}

}  // namespace
}  // namespace titan::train
