// Compares a Llama with FSDP, DDP and HSDP with the same model on one rank: the loss, every parameter's
// gradient, a whole training run, and memory.

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include <gtest/gtest.h>

#include "core/file.h"
#include "data/feed/feeds.h"
#include "distributed/llama_case.h"
#include "titan/checkpoint/safetensors.h"
#include "titan/core/error.h"
#include "titan/core/log.h"
#include "titan/optim/clip.h"
#include "titan/optim/lr_schedule.h"
#include "titan/optim/optimizer.h"

namespace titan {
namespace {

using namespace titan::testing;  // NOLINT: the test's own names

constexpr uint64_t kSeed = 3;

struct Tolerance {
  double loss;
  double gradient;
};

Tolerance tolerance_of(at::ScalarType dtype) {
  return dtype == at::kDouble ? Tolerance{1e-12, 1e-10} : Tolerance{5e-6, 1e-5};
}

// The largest deviations, for the log.
struct Worst {
  double loss = 0;
  double gradient = 0;
};

void expect_equal(train::TrainableModel& model, double loss, const LlamaStep& reference, at::ScalarType dtype,
                  const std::string& what, Worst& worst) {
  Tolerance tolerance = tolerance_of(dtype);
  EXPECT_NEAR(loss, reference.loss, tolerance.loss) << what;
  worst.loss = std::max(worst.loss, std::abs(loss - reference.loss));
  auto list = parameters(model.root());
  EXPECT_EQ(list.size(), reference.gradients.size()) << what;
  for (const Parameter& parameter : list) {
    double error = relative_error(full_gradient(parameter), reference.gradients.at(parameter.name));
    EXPECT_LE(error, tolerance.gradient) << what << " " << parameter.name;
    worst.gradient = std::max(worst.gradient, error);
  }
}

std::vector<ReshardAfterForward> policies(const DataLayout& layout) {
  std::vector<ReshardAfterForward> all = {{}, ReshardAfterForward::always(), ReshardAfterForward::never()};
  if (layout.shard == 4) all.push_back(ReshardAfterForward::to_size(2));
  return all;
}

struct ParityCase {
  LlamaCase llama;
  at::ScalarType dtype;
};

class FsdpParity : public ::testing::TestWithParam<ParityCase> {};

TEST_P(FsdpParity, LossAndEveryGradientMatchOneRank) {
  const auto& [llama, dtype] = GetParam();
  int size = world().size(), rank = world().rank();
  Batch batch = random_batch(llama, 1);
  const LlamaStep reference = run_on_one_rank(llama, batch, dtype, kSeed);
  Worst worst;
  for (const DataLayout& layout : layouts(size)) {
    train::Meshes meshes = meshes_of(layout);
    for (const auto& policy : policies(layout)) {
      for (bool reduce_every : {true, false}) {
        auto model = build_sharded_llama(
            llama, dtype, meshes,
            {.mesh = {}, .reshard_after_forward = policy, .reduce_every_micro_batch = reduce_every});
        materialize(model->root(), kSeed);
        for (int micro_batches : {1, 4}) {
          std::string what = titan::str(llama.name, " replicate ", layout.replicate, " shard ", layout.shard,
                                        " policy ", static_cast<int>(policy.kind), " reduce_every ",
                                        reduce_every, " micro-batches ", micro_batches);
          forget_gradients(*model);
          double loss = forward_backward(*model, batch, rank, size, micro_batches);
          expect_equal(*model, loss, reference, dtype, what, worst);
        }
      }
    }
  }
  log::info_rank0(
      titan::str("worst difference of the loss ", worst.loss, ", of a gradient ", worst.gradient));
}

INSTANTIATE_TEST_SUITE_P(
    Models, FsdpParity,
    ::testing::Values(ParityCase{mini_llama(), at::kFloat}, ParityCase{mini_llama(), at::kDouble},
                      ParityCase{uneven_llama(), at::kFloat}, ParityCase{uneven_llama(), at::kDouble},
                      ParityCase{tied_llama(), at::kDouble}),
    [](const auto& info) { return info.param.llama.name + c10::toString(info.param.dtype); });

// ---- initial weights

struct InitCase {
  LlamaCase llama;
  at::ScalarType dtype;  // dtype of the optimizer's weights
};

class FsdpInit : public ::testing::TestWithParam<InitCase> {};

// No rank ever has a whole parameter here, but the parts are bitwise equal to one rank's weights.
TEST_P(FsdpInit, EveryLayoutStartsFromTheSameBits) {
  const auto& [llama, dtype] = GetParam();
  auto single = build_llama(llama, dtype);
  materialize(single->root(), kSeed);
  const auto expected = parameters(single->root());
  for (const DataLayout& layout : layouts(world().size())) {
    for (at::ScalarType compute : {dtype, at::kBFloat16}) {
      auto model = build_sharded_llama(llama, dtype, meshes_of(layout), {.mesh = {}, .param_dtype = compute});
      materialize(model->root(), kSeed);
      const auto list = parameters(model->root());
      ASSERT_EQ(list.size(), expected.size());
      for (size_t i = 0; i < list.size(); ++i) {
        EXPECT_EQ(list[i].name, expected[i].name);
        at::Tensor whole = full_tensor(list[i].data);
        EXPECT_EQ(whole.scalar_type(), dtype) << list[i].name;
        EXPECT_TRUE(at::equal(whole, expected[i].data.local))
            << list[i].name << ", replicate " << layout.replicate << " shard " << layout.shard;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Models, FsdpInit,
    ::testing::Values(InitCase{mini_llama(), at::kFloat}, InitCase{uneven_llama(), at::kFloat},
                      InitCase{uneven_llama(), at::kBFloat16}, InitCase{tied_llama(), at::kFloat}),
    [](const auto& info) { return info.param.llama.name + c10::toString(info.param.dtype); });

// With bfloat16 parameters the sharded model computes the same as FSDP on one rank; only the order of sums
// differs.
TEST(FsdpParityBf16, IsNearOneRank) {
  LlamaCase llama = uneven_llama();
  int size = world().size(), rank = world().rank();
  Batch batch = random_batch(llama, 2);
  FsdpOptions options{.mesh = {}, .param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
  auto single = build_llama(llama, at::kFloat);
  train::Meshes meshes = meshes_of({1, size}), alone;
  llama_spec().parallelize(*single, {.meshes = alone, .fsdp = options});
  materialize(single->root(), kSeed);
  double expected = forward_backward(*single, batch, 0, 1, 1);
  auto model = build_sharded_llama(llama, at::kFloat, meshes, options);
  materialize(model->root(), kSeed);
  EXPECT_NEAR(forward_backward(*model, batch, rank, size, 1), expected, 2e-3);
  auto references = parameters(single->root()), list = parameters(model->root());
  for (size_t i = 0; i < list.size(); ++i) {
    EXPECT_LE(relative_error(full_gradient(list[i]), references[i].data.local.grad()), 2e-2) << list[i].name;
  }
}

// ---- a training run

const std::filesystem::path kMini = TITAN_SOURCE_DIR "/tests/data/parity/mini";

Batch recorded_batch(const data::NpyArray& input, const data::NpyArray& labels, int64_t step) {
  auto read = [&](const data::NpyArray& array) {
    at::Tensor rows = at::empty({array.shape()[1], array.shape()[2]}, at::kLong);
    for (int64_t row = 0; row < rows.size(0); ++row) {
      array.read_row(
          step, row,
          {rows.mutable_data_ptr<int64_t>() + row * rows.size(1), static_cast<size_t>(rows.size(1))});
    }
    return rows;
  };
  return {read(input), read(labels)};
}

struct StepResult {
  double loss;
  double grad_norm;
};

std::vector<StepResult> train_mini(train::TrainableModel& model, int rank, int degree, int64_t num_steps) {
  data::NpyArray input(kMini / "input.npy"), labels(kMini / "labels.npy");
  auto list = parameters(model.root());
  optim::Optimizer optimizer(list, {});
  optim::LrSchedule schedule({.warmup_steps = 2, .total_steps = {}, .decay_ratio = 0.8}, 20);
  std::vector<StepResult> results;
  for (int64_t step = 0; step < num_steps; ++step) {
    optimizer.zero_grad();
    double loss = forward_backward(model, recorded_batch(input, labels, step), rank, degree, 1);
    optim::GradNorm norm = optim::clip_grad_norm(list, 1.0);
    optimizer.set_lr_factor(schedule.factor(step));
    optimizer.step();
    results.push_back({loss, norm.norm});
  }
  return results;
}

TEST(FsdpParityRun, MatchesTorchTitanAndOneRank) {
  auto fixture = nlohmann::json::parse(read_file(kMini / "fixture.json"));
  const auto& steps = fixture.at("steps");
  auto num_steps = static_cast<int64_t>(steps.size());
  auto single = build_llama(mini_llama(), at::kFloat);
  materialize(single->root(), kSeed);
  load_model(parameters(single->root()), kMini / "titan.safetensors");
  auto expected = train_mini(*single, 0, 1, num_steps);
  for (const DataLayout& layout : layouts(world().size())) {
    auto model = build_sharded_llama(mini_llama(), at::kFloat, meshes_of(layout), {});
    materialize(model->root(), kSeed);
    load_model(parameters(model->root()), kMini / "titan.safetensors");
    auto results = train_mini(*model, world().rank(), world().size(), num_steps);
    for (size_t step = 0; step < results.size(); ++step) {
      std::string what =
          titan::str("replicate ", layout.replicate, " shard ", layout.shard, " step ", step + 1);
      EXPECT_NEAR(results[step].loss, steps[step].at("loss").get<double>(), 1e-5) << what;
      EXPECT_NEAR(results[step].loss, expected[step].loss, 5e-6) << what;
      EXPECT_NEAR(results[step].grad_norm / steps[step].at("grad_norm").get<double>(), 1, 1e-4) << what;
    }
  }
}

// ---- memory

// Bytes of parameters, gradients and optimizer state on a rank.
int64_t owned_bytes(train::TrainableModel& model) {
  auto list = parameters(model.root());
  optim::Optimizer optimizer(list, {});
  int64_t bytes = 0;
  for (const auto& [name, state] : optimizer.state()) {
    bytes += static_cast<int64_t>(state.at("exp_avg").local.nbytes() + state.at("exp_avg_sq").local.nbytes());
  }
  for (const Parameter& parameter : list) {
    bytes += static_cast<int64_t>(parameter.data.local.nbytes() + parameter.data.local.grad().nbytes());
  }
  return bytes;
}

TEST(FsdpMemory, IsOneNthOfThatOfOneRank) {
  LlamaCase llama = mini_llama();
  int size = world().size(), rank = world().rank();
  Batch batch = random_batch(llama, 1);
  auto single = build_llama(llama, at::kFloat);
  materialize(single->root(), kSeed);
  forward_backward(*single, batch, 0, 1, 1);
  auto model = build_sharded_llama(llama, at::kFloat, meshes_of({1, size}), {});
  materialize(model->root(), kSeed);
  forward_backward(*model, batch, rank, size, 1);
  double share = static_cast<double>(owned_bytes(*model)) * size / static_cast<double>(owned_bytes(*single));
  // The last rank's part may be smaller, because chunks are rounded up.
  EXPECT_LE(share, 1.05);
  if (rank == 0) EXPECT_GE(share, 0.95);
}

TEST(FsdpMemory, GathersFewGroupsAndAllocatesBuffersOnce) {
  LlamaCase llama = uneven_llama();
  int size = world().size(), rank = world().rank();
  if (size == 1) GTEST_SKIP() << "one rank gathers nothing";
  auto model = build_sharded_llama(llama, at::kFloat, meshes_of({1, size}), {});
  materialize(model->root(), kSeed);
  int64_t allocations = 0;
  for (int step = 0; step < 6; ++step) {
    forget_gradients(*model);
    forward_backward(*model, random_batch(llama, static_cast<uint64_t>(step)), rank, size, 2);
    FsdpStats stats = fsdp_stats(model->root());
    EXPECT_LE(stats.max_gathered_groups, 3) << "two layers and the unsharded tail";
    EXPECT_EQ(stats.gathered_groups, 0);
    if (step >= 2 && device().is_cpu())
      EXPECT_EQ(stats.communication_buffer_allocations, allocations) << "step " << step;
    allocations = stats.communication_buffer_allocations;
  }
}

}  // namespace
}  // namespace titan
