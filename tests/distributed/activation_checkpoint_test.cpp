// Activation checkpointing inside FSDP, HSDP, tensor and context parallelism: results are bit-equal to those
// without checkpointing, FSDP's backward doesn't end early, and all ranks make the same choice.
// composition_test.cpp compares with one rank.

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "dist/device_backend.h"
#include "dist/flight_record.h"
#include "distributed/llama_case.h"
#include "titan/core/error.h"
#include "titan/nn/layers.h"
#include "unit/parallel/checkpoint_case.h"

namespace titan {
namespace {

using namespace titan::testing;  // NOLINT: the test's own names

constexpr uint64_t kSeed = 3;

LlamaCase deep_llama() {
  LlamaCase llama = mini_llama();
  llama.args["n_layers"] = int64_t{4};
  llama.seq_len = 32;
  return llama;
}

std::vector<train::ParallelDims> all_dims() {
  const int size = world().size();
  std::vector<train::ParallelDims> all{{.dp_shard = size}};
  if (size > 1) all.push_back({.dp_replicate = size});
  if (size % 2 == 0) {
    all.push_back({.dp_shard = size / 2, .tp = 2});
    all.push_back({.dp_shard = size / 2, .rows = {{"cp", 2}}});
  }
  if (size == 4) all.push_back({.dp_replicate = 2, .dp_shard = 2});
  return all;
}

std::string name_of(const train::ParallelDims& dims) {
  return str("dp_replicate ", dims.dp_replicate, " dp_shard ", dims.dp_shard, " cp ", dims.row_degree(),
             " tp ", dims.tp);
}

struct Case {
  const char* name;
  train::ActivationCheckpoint checkpoint;
};

std::vector<Case> cases() {
  const ActivationCheckpointOptions to_the_end{.early_stop = false};
  return {{"full", {FullRecompute{}, {}}},
          {"full to the end", {FullRecompute{}, to_the_end}},
          {"op", {SelectiveOp{}, {}}},
          {"op to the end", {SelectiveOp{}, to_the_end}},
          {"every second layer", {SelectiveLayers{2}, {}}},
          {"budget", {MemoryBudget{.fraction = 0.5, .group = world().everyone()}, {}}}};
}

std::unique_ptr<train::TrainableModel> build(const train::Meshes& meshes,
                                             const train::ActivationCheckpoint& checkpoint) {
  auto model = build_llama(deep_llama(), at::kFloat);
  llama_spec().parallelize(*model,
                           {.meshes = meshes, .fsdp = {.mesh = meshes.fsdp}, .activations = checkpoint});
  materialize(model->root(), kSeed);
  return model;
}

struct Outcome {
  std::vector<double> losses;
  std::vector<at::Tensor> gradients;  // this rank's parts, from the last step
  int64_t max_gathered = 0, gathered = 0;
};

// Runs three steps with the same weights, because a memory budget measures in the first one.
Outcome run(train::TrainableModel& model, const train::Meshes& meshes, int micro_batches) {
  const Batch batch = random_batch(deep_llama(), 1);
  const int64_t num_valid = batch.num_valid();
  const Batch mine = batch.rows(meshes.dp_rank(), meshes.dp_degree());
  Outcome outcome;
  for (int step = 0; step < 3; ++step) {
    forget_gradients(model);
    for (int m = 0; m < micro_batches; ++m) {
      set_last_micro_batch(model.root(), m + 1 == micro_batches);
      const Batch part = mine.rows(m, micro_batches);
      const at::Tensor loss = model.loss(part.tokens.to(device()), part.labels.to(device()), num_valid);
      loss.backward();
      outcome.losses.push_back(loss.item<double>());
    }
  }
  for (const Parameter& parameter : parameters(model.root()))
    outcome.gradients.push_back(parameter.data.local.grad().clone());
  const FsdpStats stats = fsdp_stats(model.root());
  outcome.max_gathered = stats.max_gathered_groups;
  outcome.gathered = stats.gathered_groups;
  return outcome;
}

// By default with one and two micro-batches in turn.
void expect_bit_equal_to_none(const std::vector<Case>& cases,
                              const std::vector<train::ParallelDims>& layouts) {
  // Some GPU kernels would otherwise sum in a random order.
  if (device().is_cuda()) at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true);
  int turn = 0;
  for (const train::ParallelDims& dims : layouts) {
    const train::Meshes meshes = train::build_meshes(world(), dims);
    ++turn;
    for (const int micro_batches : {1, 2}) {
      if (micro_batches == 1 + turn % 2 && !testing::all_cases()) continue;
      const auto plain = build(meshes, {});
      const Outcome expected = run(*plain, meshes, micro_batches);
      for (const Case& each : cases) {
        const std::string what = str(name_of(dims), " micro-batches ", micro_batches, " ", each.name);
        const auto model = build(meshes, each.checkpoint);
        ASSERT_TRUE(checkpoints_activations(model->root()));
        const Outcome got = run(*model, meshes, micro_batches);
        EXPECT_EQ(got.losses, expected.losses) << what;
        ASSERT_EQ(got.gradients.size(), expected.gradients.size());
        for (size_t i = 0; i < got.gradients.size(); ++i)
          EXPECT_TRUE(got.gradients[i].equal(expected.gradients[i])) << what << ", parameter " << i;
        EXPECT_EQ(got.gathered, expected.gathered) << what;
        EXPECT_EQ(got.max_gathered, expected.max_gathered) << what << ": recomputes gather nothing";
      }
    }
  }
}

TEST(ActivationCheckpoint, IsBitEqualToNoneOnEveryLayout) { expect_bit_equal_to_none(cases(), all_dims()); }

// The GPU memory that a forward keeps for its backward.
int64_t held_on_the_gpu(const train::Meshes& meshes, const train::ActivationCheckpoint& checkpoint) {
  const auto allocated = [] { return dist::device_backend()->memory(device().index()).allocated_bytes; };
  const auto model = build(meshes, checkpoint);
  run(*model, meshes, 1);  // allocates memory that all steps keep
  forget_gradients(*model);
  const Batch batch = random_batch(deep_llama(), 1), mine = batch.rows(meshes.dp_rank(), meshes.dp_degree());
  const int64_t before = allocated();
  const at::Tensor loss = model->loss(mine.tokens.to(device()), mine.labels.to(device()), batch.num_valid());
  const int64_t held = allocated() - before;
  loss.backward();
  return held;
}

// On virtual GPUs so far. offload_test.cpp tests the logic, with CPU memory on both sides.
void expect_offloaded_activations_to_return(const std::vector<train::ParallelDims>& layouts) {
  if (!device().is_cuda()) GTEST_SKIP() << "activations are offloaded from GPUs only";
  const train::ActivationCheckpoint offload{OffloadActivations{.min_bytes = 1024}, {}};
  expect_bit_equal_to_none({{"offload", offload}}, layouts);
  for (const train::ParallelDims& dims : layouts) {
    const train::Meshes meshes = train::build_meshes(world(), dims);
    EXPECT_LT(held_on_the_gpu(meshes, offload), held_on_the_gpu(meshes, {})) << name_of(dims);
  }
}

TEST(OffloadedActivations, ReturnUnchangedWithFsdp) {
  expect_offloaded_activations_to_return({all_dims().front()});
}

TEST(OffloadedActivations, ReturnUnchangedOnOtherLayouts) {
  const std::vector<train::ParallelDims> all = all_dims();
  expect_offloaded_activations_to_return({all.begin() + 1, all.end()});
}

// A layer's recompute gathers, multiplies and reduce-scatters, and gathers for its second half; operations
// after the last saved tensor don't run.
TEST(ActivationCheckpoint, DoesNotRepeatKeptReduceScattersAndRingAttention) {
  if (world().size() == 1) GTEST_SKIP() << "one rank has no peers";
  const auto calls = [](const train::ParallelDims& dims, const train::ActivationCheckpoint& checkpoint) {
    const train::Meshes meshes = train::build_meshes(world(), dims);
    const auto model = build(meshes, checkpoint);
    run(*model, meshes, 1);
    const uint64_t before = world().recorder().num_calls();
    run(*model, meshes, 1);
    return static_cast<int64_t>(world().recorder().num_calls() - before);
  };
  constexpr int64_t kSteps = 3, kLayers = 4;
  const train::ActivationCheckpoint none, full{FullRecompute{}, {}}, op{SelectiveOp{}, {}};

  const train::ParallelDims tp{.dp_shard = world().size() / 2, .tp = 2};
  EXPECT_EQ(calls(tp, full) - calls(tp, none), kSteps * kLayers * 3);
  EXPECT_EQ(calls(tp, op) - calls(tp, none), kSteps * kLayers * 2);

  const train::ParallelDims cp{.dp_shard = world().size() / 2, .rows = {{"cp", 2}}};
  EXPECT_GT(calls(cp, full), calls(cp, none));
  EXPECT_EQ(calls(cp, op), calls(cp, none));
}

// Slow on one rank, which by its own times would keep results that the others recompute.
class SlowProducts : public CountingProducts {
 public:
  at::Tensor forward(const ops::Operand& x, const ops::Operand& weight) const override {
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
    return CountingProducts::forward(x, weight);
  }
};

TEST(ActivationCheckpoint, SpendsAMemoryBudgetTheSameWayOnAllRanks) {
  const train::Meshes meshes = train::build_meshes(world(), {.dp_shard = world().size()});
  for (const double fraction : {0.2, 0.5, 0.8}) {
    const auto model = build(meshes, {MemoryBudget{.fraction = fraction, .group = world().everyone()}, {}});
    if (world().rank() == 0) nn::set_products(model->root().module(), std::make_shared<const SlowProducts>());
    run(*model, meshes, 1);
    const Batch batch = random_batch(deep_llama(), 1);
    // Not the host's memory: of gloo's copies of GPU tensors, this thread allocates some that other threads free.
    MemoryMeter meter(device().type());
    const at::Tensor loss =
        model->loss(batch.tokens.to(device()), batch.labels.to(device()), batch.num_valid());
    const auto bytes = static_cast<double>(meter.bytes());
    // NCCL's thread frees the few bytes of finished calls when it gets to them. A result that only some ranks
    // keep is larger.
    const double largest = world().everyone()->max(bytes, {"test::bytes"});
    EXPECT_NEAR(largest, bytes, 256) << fraction;
    loss.backward();
  }
}

}  // namespace
}  // namespace titan
