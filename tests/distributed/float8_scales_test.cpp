// Scales that ranks compute together: the number of their collectives, and that the scales match the current
// weights.

#include <limits>

#include "distributed/float8_stack.h"
#include "distributed/recorded_calls.h"

namespace titan {
namespace {

using namespace titan::testing::stack;  // NOLINT: the test's own names
using testing::calls_of;
using testing::world;

// A weight's scale is reduced once per step. An activation's scale is reduced once for each cast: the input
// of w1 and w3, the input of w2, and three gradients.
TEST(Float8, ReducesScalesOverTheAxisOnce) {
  if (world().size() != 2) GTEST_SKIP() << "needs two ranks";
  const Spread spread = make({.layout = {.tp = 2, .plan = sequence_plan()}, .mixed = true});
  for (int step = 0; step < 2; ++step) {
    const auto micro_batches = [&] {
      for (int i = 0; i < 2; ++i) loss_of(spread.model, global_batch()).backward();
    };
    EXPECT_EQ(calls_of("tp::float8_scales", micro_batches).size(), size_t{kBlocks} * (3 + 2 * 5)) << step;
    at::NoGradGuard no_grad;
    for (const Parameter& parameter : parameters(spread.model)) at::Tensor(parameter.data.local).mul_(0.9);
  }
}

// Each step changes the shards, so it needs new scales.
TEST(Float8, ReducesScalesOncePerStepOrGroup) {
  if (world().size() == 1) GTEST_SKIP() << "one rank needs no reduction";
  for (const bool at_once : {false, true}) {
    const Spread spread =
        make({.layout = {.shard = world().size()}, .gather = {.in_float8 = true, .scales_at_once = at_once}});
    for (int step = 0; step < 2; ++step) {
      const auto micro_batches = [&] {
        for (int i = 0; i < 2; ++i) loss_of(spread.model, global_batch()).backward();
      };
      EXPECT_EQ(calls_of("fsdp::float8_scales", micro_batches).size(), at_once ? 1u : size_t{kBlocks});
      at::NoGradGuard no_grad;
      for (const Parameter& parameter : parameters(spread.model)) at::Tensor(parameter.data.local).mul_(0.9);
    }
  }
}

// Also with tensor parallelism, whose ranks share a scale, one pass computes the magnitudes of all weights,
// and one reduction over each axis combines them, for any number of micro-batches. Activations' scales stay
// separate.
TEST(Float8, AllWeightsTakeOnePassAndOneReductionPerAxis) {
  if (world().size() == 1 || world().size() == 3) GTEST_SKIP() << "needs an even number of ranks";
  const bool two_axes = world().size() == 4;
  const Spread spread = make({.layout = {.shard = 2, .tp = two_axes ? 2 : 1, .plan = sequence_plan()},
                              .gather = {.in_float8 = true, .scales_at_once = true},
                              .mixed = true});
  constexpr int num_micro_batches = 2;
  const auto micro_batches = [&] {
    for (int i = 0; i < num_micro_batches; ++i) loss_of(spread.model, global_batch()).backward();
  };
  for (int step = 0; step < 2; ++step) {
    int passes = 0;
    size_t over_shards = 0, over_parts = 0;
    {
      const testing::OperationWatch watch([&](const std::string& name, const auto& /*outputs*/) {
        passes += name == "titan::float8_amax_many";
      });
      over_parts = calls_of(ops::kScalesPhase, [&] {
                     over_shards = calls_of("fsdp::float8_scales", micro_batches).size();
                   }).size();
    }
    EXPECT_EQ(passes, 1) << step;
    EXPECT_EQ(over_shards, 1u) << step;
    EXPECT_EQ(over_parts, two_axes ? 1 + size_t{num_micro_batches} * kBlocks * 5 : 0u) << step;
    at::NoGradGuard no_grad;
    for (const Parameter& parameter : parameters(spread.model)) at::Tensor(parameter.data.local).mul_(0.9);
  }
}

// A step changes the shards, so the next gather has new scales.
TEST(Float8, ScalesFollowTheWeights) {
  const StackLayout layout{.shard = world().size()};
  for (const bool at_once : {false, true}) {
    const Spread gathered =
                     make({.layout = layout, .gather = {.in_float8 = true, .scales_at_once = at_once}}),
                 plain = make({.layout = layout});
    for (const float factor : {1.0f, 3.0f, 0.01f}) {
      for (const Spread* each : {&gathered, &plain})
        for (const Parameter& parameter : parameters(each->model)) {
          at::NoGradGuard no_grad;
          at::Tensor(parameter.data.local).mul_(factor);
        }
      at::NoGradGuard no_grad;
      const at::Tensor got = gathered.model(global_batch()), wanted = plain.model(global_batch());
      EXPECT_LT(((got - wanted).norm() / wanted.norm()).item<double>(), 1e-6) << factor;
    }
  }
}

TEST(Float8, NanInOneShardReachesTheWholeWeight) {
  const Spread spread = make({.layout = {.shard = world().size()}, .gather = {.in_float8 = true}});
  at::NoGradGuard no_grad;
  if (world().rank() == world().size() - 1)
    at::Tensor(parameters(spread.model)[0].data.local).view(-1)[0] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(at::isnan(spread.model(global_batch())).all().item<bool>());
}

}  // namespace
}  // namespace titan
