// Layers in Float8 with FSDP and tensor parallelism have one rank's loss and gradients, also with activation
// checkpoints and frozen weights. float8_wire_test.cpp tests the sent bytes, float8_scales_test.cpp scales,
// float8_layer_test.cpp a single layer, and float8_pipeline_test.cpp pipelines.

#include "distributed/float8_stack.h"

namespace titan {
namespace {

using namespace titan::testing::stack;  // NOLINT: the test's own names
using testing::device;
using testing::world;

TEST(Float8, EveryLayoutMatchesOneRank) {
  for (const std::string& recipe : kRecipes)
    for (const StackLayout& layout : layouts()) expect_one_ranks({.recipe = recipe, .layout = layout});
}

TEST(Float8, GatheringInFloat8MatchesOneRank) {
  for (const StackLayout& layout : layouts())
    for (const bool at_once : {false, true})
      for (const ReshardAfterForward& reshard : {ReshardAfterForward::always(), ReshardAfterForward::never()})
        expect_one_ranks({.layout = layout,
                          .gather = {.in_float8 = true, .scales_at_once = at_once},
                          .fsdp = {.reshard_after_forward = reshard},
                          .mixed = at_once});
}

// Also if they share a gather, a cast of their input or a graph node with trainable weights.
TEST(Float8, FrozenWeightsMatchOneRank) {
  for (const StackLayout& layout : layouts()) {
    for (const std::string& recipe : kRecipes)
      expect_one_ranks({.recipe = recipe, .layout = layout, .mixed = true, .frozen = true});
    for (const bool at_once : {false, true})
      expect_one_ranks({.layout = layout,
                        .gather = {.in_float8 = true, .scales_at_once = at_once},
                        .mixed = at_once,
                        .frozen = true});
  }
}

// For every recipe, with weights gathered in Float8, and with a split sequence.
TEST(Float8, RecomputingActivationsChangesNoBit) {
  std::vector<Case> cases;
  for (const StackLayout& layout : layouts()) {
    for (const std::string& recipe : kRecipes) cases.push_back({.recipe = recipe, .layout = layout});
    cases.push_back({.layout = layout, .gather = {.in_float8 = true}, .mixed = true, .frozen = true});
    if (layout.tp == 1) continue;
    StackLayout in_parts = layout;
    in_parts.plan = sequence_plan();
    for (const std::string& recipe : kRecipes)
      cases.push_back({.recipe = recipe,
                       .layout = in_parts,
                       .gather = {.in_float8 = recipe == "tensorwise"},
                       .mixed = true});
  }
  for (Case& c : cases) {
    SCOPED_TRACE(name_of(c));
    const Outcome wanted = spread_out(c);
    for (const LayersPolicy& policy : {LayersPolicy(FullRecompute{}), LayersPolicy(SelectiveOp{})}) {
      c.checkpoint = policy;
      const Outcome got = spread_out(c);
      EXPECT_EQ(got.loss, wanted.loss) << policy.index();
      for (const auto& [name, gradient] : wanted.gradients) {
        if (!gradient.defined()) continue;
        EXPECT_TRUE(at::equal(got.gradients.at(name), gradient)) << policy.index() << " " << name;
      }
    }
  }
}

// A CPU has a product of matrices with one scale each, which needs the same operand layout as a GPU, also for
// gathered bytes, which are transposed for the backward.
TEST(Float8, CpuProductsMatchOneRank) {
  if (!device().is_cpu()) GTEST_SKIP() << "the other tests use the GPU's products";
  for (const StackLayout& layout : layouts())
    for (const bool in_float8 : {false, true})
      if (layout.shard > 1 || !in_float8)
        expect_one_ranks({.layout = layout,
                          .gather = {.in_float8 = in_float8},
                          .mixed = true,
                          .arithmetic = float8::Arithmetic::Hardware});
}

// The layers that multiply activations gather them, in one collective or part by part.
TEST(Float8, SequenceInPartsMatchesOneRank) {
  const int size = world().size();
  if (size == 3) GTEST_SKIP() << "the hidden features aren't a multiple of 3 x 16";
  for (const auto transport : {OverlapTransport::AtOnce, OverlapTransport::SendReceive})
    for (const std::string& recipe : kRecipes) {
      expect_one_ranks({.recipe = recipe,
                        .layout = {.tp = size, .plan = sequence_plan(), .transport = transport},
                        .mixed = true});
      if (size == 4)
        expect_one_ranks({.recipe = recipe,
                          .layout = {.shard = 2, .tp = 2, .plan = sequence_plan(), .transport = transport},
                          .gather = {.in_float8 = recipe == "tensorwise"},
                          .mixed = true});
    }
}

TEST(Float8, PartsKeptForTheBackwardAreBytesToo) {
  if (world().size() != 4) GTEST_SKIP() << "needs a shard axis of 4";
  for (const bool mixed : {false, true})
    expect_one_ranks({.layout = {.shard = 4},
                      .gather = {.in_float8 = true},
                      .fsdp = {.reshard_after_forward = ReshardAfterForward::to_size(2)},
                      .mixed = mixed});
}

// Split weights share a scale with other ranks; whole ones don't.
TEST(Float8, GroupsMayMixSplitAndWholeWeights) {
  if (world().size() != 4) GTEST_SKIP() << "needs 2 x 2 ranks";
  for (const bool at_once : {false, true})
    expect_one_ranks({.layout = {.shard = 2, .tp = 2, .plan = kFirstWeightAlone},
                      .gather = {.in_float8 = true, .scales_at_once = at_once}});
}
}  // namespace
}  // namespace titan
