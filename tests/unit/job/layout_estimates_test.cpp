#include "job/layout_estimates.h"

#include <algorithm>

#include <gtest/gtest.h>

#include "titan/config/load.h"
#include "titan/models/llama3.h"
#include "titan/optim/optimizer.h"
#include "titan/parallel/pipeline_schedule.h"

namespace titan::train {
namespace {

using plan::Activity;
using plan::Category;

// Plans of three and of five layers. A layer takes 2 s and 7 bytes: 3 of activations, 1 of parameters and of gradients, 2 of optimizer states.
std::vector<PlanAnswer> answers() {
  std::vector<PlanAnswer> plans;
  for (const int64_t layers : {3, 5}) {
    PlanAnswer& plan = plans.emplace_back();
    plan.step_s = 10.0 + 2.0 * static_cast<double>(layers);
    plan.seconds[static_cast<size_t>(Activity::Optimizer)] = 1 + 0.5 * static_cast<double>(layers);
    plan.parameters = 100.0 + 10.0 * static_cast<double>(layers);
    const auto set = [&](Category category, int64_t bytes) {
      plan.most_bytes[static_cast<size_t>(category)] = bytes;
    };
    set(Category::Parameters, layers);
    set(Category::Optimizer, 2 * layers);
    set(Category::Activations, 200);  // the embedding's gradient
    plan.saved_bytes = 3 * layers;
    set(Category::Gradients, layers == 3 ? 1000 : 500);  // those that are whole at some moment
    set(Category::Gathered, layers == 3 ? 300 : 400);
  }
  return plans;
}

constexpr ParameterBytes kBytes{.state = 16, .gathered = 2, .whole_gradient = 4};

TEST(ParameterBytes, AreThoseOfTheJobsDtypesAndOptimizer) {
  JobConfig config;
  EXPECT_EQ(parameter_bytes(config).state, 4 + 4 + 2 * 4);
  EXPECT_EQ(parameter_bytes(config).gathered, 2);
  EXPECT_EQ(parameter_bytes(config).whole_gradient, 4);
  config.training.mixed_precision_param = "float32";
  config.training.mixed_precision_reduce = "bfloat16";
  EXPECT_EQ(parameter_bytes(config).gathered, 4);
  EXPECT_EQ(parameter_bytes(config).whole_gradient, 2);
  config.optimizer.state_dtype = "bfloat16";
  EXPECT_EQ(parameter_bytes(config).state, 4 + 4 + 2 * 2);
  const optim::OptimizerRule<optim::OptimizerSettings> one_moment{
      .state = {"momentum"}, .step = [](const optim::OptimizerSettings&, const optim::Update&) {}};
  if (!optim::optimizers().contains("one_moment")) optim::optimizers().add("one_moment", one_moment);
  config.optimizer.name = "one_moment";
  EXPECT_EQ(parameter_bytes(config).state, 4 + 4 + 4);
}

TEST(BlockCosts, AreThoseOfALayerAndTheRest) {
  const BlockCosts costs = block_costs({}, {}, answers(), kBytes);
  EXPECT_EQ(costs.error, "");
  EXPECT_DOUBLE_EQ(costs.once.of_layer, 0.5);
  EXPECT_DOUBLE_EQ(costs.seconds.of_layer, 1.5);
  EXPECT_DOUBLE_EQ(costs.seconds.rest, 9);
  EXPECT_DOUBLE_EQ(costs.parameters.rest, 100);
}

TEST(BlockCosts, CountWholeParametersAndGradientsOnlyWhereTheyStay) {
  EXPECT_DOUBLE_EQ(block_costs({}, {}, answers(), kBytes).bytes.of_layer, 7);
  EXPECT_DOUBLE_EQ(block_costs({}, {}, answers(), kBytes).bytes.of(5), 500 + 400 + 200 + 15);
  EXPECT_DOUBLE_EQ(block_costs({.tensor = 2, .keeps_gathered = true}, {}, answers(), kBytes).bytes.of_layer,
                   7 + 10 * (2 + 4) / 2.0);
}

TEST(BlockCosts, HaveTheReasonWhyThereAreNone) {
  std::vector<PlanAnswer> refused = answers();
  refused[1].error = "no";
  EXPECT_EQ(block_costs({}, {}, refused, kBytes).error, "no");
}

TEST(BlockCosts, OfPipelinesComeFromOneReplica) {
  const Layout layout{
      .tensor = 4, .context = 2, .pipeline = 8, .replicate = 2, .schedule = "1F1B", .micro_batch = 3};
  const Layout kind = block_kind(layout);
  Layout other = layout;
  other.pipeline = 16;
  other.schedule = "GPipe";
  EXPECT_EQ(kind, block_kind(other));
  for (const PlanRequest& request : block_requests(kind, {}, 512)) EXPECT_EQ(request.world, 8);
  other.pipeline = 1;
  for (const PlanRequest& request : block_requests(block_kind(other), {}, 512)) EXPECT_EQ(request.world, 512);
}

// With three and five layers, every third one would be one of each.
TEST(BlockLayers, HaveTheSameShareOfRecomputedLayers) {
  using Pair = std::pair<int64_t, int64_t>;
  JobConfig config;
  const auto layers_of = [&](const Layout& kind, const char* option) {
    config.activation_checkpoint.selective_ac_option = option;
    const BlockLayers layers = block_layers(kind, config);
    return Pair(layers.few, layers.more);
  };
  const Layout selective{.recompute = "selective"};
  EXPECT_EQ(layers_of(selective, "1"), Pair(3, 5));
  EXPECT_EQ(layers_of(selective, "2"), Pair(4, 6));
  EXPECT_EQ(layers_of(selective, "3"), Pair(3, 6));
  EXPECT_EQ(layers_of(selective, "8"), Pair(8, 16));
  EXPECT_EQ(layers_of({.recompute = "full"}, "8"), Pair(3, 5));
  const Layout only_degrees{.only_degrees = true};
  config.activation_checkpoint.mode = "selective";
  EXPECT_EQ(layers_of(only_degrees, "8"), Pair(8, 16));
  EXPECT_EQ(layers_of(only_degrees, "op"), Pair(3, 5));
  config.activation_checkpoint.mode = "full";
  EXPECT_EQ(layers_of(only_degrees, "8"), Pair(3, 5));
}

TEST(Layers, DivideEvenlyWithOrWithoutTheEnds) {
  EXPECT_TRUE(divides_evenly(126, 16));  // embedding and output count for a layer each
  EXPECT_TRUE(divides_evenly(80, 16));
  EXPECT_FALSE(divides_evenly(80, 32));
}

// The inputs and gradients that delayed weight gradients are computed from, for which a search learns the bytes of a token.
TEST(LayoutEstimator, CountsTheTokensWhoseWeightGradientsWait) {
  if (!model_specs().contains("llama3")) models::register_llama3();
  JobConfig config;
  config::load(job_schema(), {std::string(TITAN_SOURCE_DIR) + "/configs/llama3_8b.toml", {}}, config);
  const SearchOptions options{.world = 8, .sequences = 32};
  LayoutEstimator estimator(config, options);
  Layout layout{.pipeline = 4, .schedule = "ZBVZeroBubble", .stages_of_rank = 2, .micro_batch = 1};
  const BlockCosts costs = block_costs(layout, {}, answers(), kBytes);
  int owed = 0;
  for (const auto& rank : pipeline::simulate(pipeline::make_schedule("ZBVZeroBubble", 4, 8, 16), {}).ranks)
    owed = std::max(owed, rank.peak_owed_weight);
  ASSERT_GT(owed, 0);
  EXPECT_EQ(estimator.of(layout, costs).delayed_tokens, owed * (32 / 8) * 8192.0);
  layout.schedule = "1F1B";
  layout.stages_of_rank = 1;
  EXPECT_EQ(estimator.of(layout, costs).delayed_tokens, 0);
}

}  // namespace
}  // namespace titan::train
