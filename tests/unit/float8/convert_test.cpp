#include "titan/float8/convert.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "titan/models/llama3.h"

namespace titan::float8 {
namespace {

using ::testing::HasSubstr;

models::Llama3 small_model(int64_t dim) {
  return models::Llama3(
      models::Llama3Args{.dim = dim, .n_layers = 2, .n_heads = 4, .vocab_size = 64, .multiple_of = 16},
      deferred(at::kMeta, at::kFloat));
}

ConvertOptions with(ConvertOptions options) {
  options.plain = ops::default_products();
  return options;
}

int64_t converted(const std::vector<LayerChoice>& choices) {
  return std::count_if(choices.begin(), choices.end(), [](const LayerChoice& c) { return c.reason.empty(); });
}

TEST(Convert, ConvertsAllLinearLayersExceptTheLossHead) {
  const auto model = small_model(32);
  const auto choices = convert(*model.ptr(), with({}));
  EXPECT_EQ(choices.size(), 15u);
  EXPECT_EQ(converted(choices), 14);
  EXPECT_EQ(summary("tensorwise", choices),
            "Float8 (tensorwise): 14 of 15 linear layers; in high precision: output: the loss head");
}

TEST(Convert, GivesEachLayerProductsThatJoinTheOthers) {
  const auto model = small_model(32);
  convert(*model.ptr(), with({}));
  const auto layers = model.ptr()->named_modules();
  const auto products_of = [&](const char* name) {
    return std::dynamic_pointer_cast<nn::LinearImpl>(layers[name])->products();
  };
  const auto wq = products_of("layers.0.attention.wq"), wk = products_of("layers.0.attention.wk");
  EXPECT_NE(wq, wk);  // each with the scale of its weight
  EXPECT_TRUE(wq->joins(*wk));
}

TEST(Convert, SkipsLayersThatAFilterNames) {
  const auto model = small_model(32);
  const auto choices =
      convert(*model.ptr(), with({.filter_fqns = {"attention.wk", "layers.1.feed_forward"}}));
  EXPECT_EQ(converted(choices), 14 - 2 - 3);
  EXPECT_THAT(summary("tensorwise", choices),
              HasSubstr("layers.*.attention.wk (2): named by filter_fqns (\"attention.wk\")"));
}

TEST(Convert, SkipsSizesThatAreNotMultiplesOf16) {
  const auto model = small_model(40);
  const auto choices = convert(*model.ptr(), with({}));
  EXPECT_EQ(converted(choices), 0);
  EXPECT_THAT(summary("tensorwise", choices), HasSubstr("40 to 40 isn't in multiples of 16"));
}

TEST(Convert, ReportsFiltersThatNameNoLayer) {
  const auto model = small_model(32);
  const std::vector<std::string> filters = {"attention.wk", "output", kAutoFilter, "atention.wq"};
  const auto choices = convert(*model.ptr(), with({.filter_fqns = filters}));
  EXPECT_EQ(idle_filters(choices, filters), std::vector<std::string>{"atention.wq"});
}

// Tensor parallelism may leave such parts.
TEST(Convert, ReportsPartsThatTheHardwareCannotMultiply) {
  for (const Arithmetic arithmetic : {Arithmetic::Emulated, Arithmetic::Hardware}) {
    const auto model = small_model(32);
    convert(*model.ptr(), with({.arithmetic = arithmetic}));
    EXPECT_TRUE(unfit_parts(*model.ptr()).empty());
    const bool hardware = arithmetic == Arithmetic::Hardware;
    model->layers[0]->attention->wq->weight.set_data(at::empty({24, 32}, at::kMeta));
    EXPECT_EQ(unfit_parts(*model.ptr()).size(), hardware ? 1u : 0u);
    model->layers[0]->attention->wq->weight.set_data(at::empty({0, 32}, at::kMeta));
    EXPECT_EQ(unfit_parts(*model.ptr()), std::vector<std::string>{"layers.0.attention.wq: 32 to 0"});
  }
}

struct Limit {
  const char* recipe;
  int64_t in, out;
  bool gains;
};

// Sizes on both sides of torchao's thresholds.
TEST(Convert, SkipsSmallLayersByTheRecipesThresholds) {
  for (const Limit& limit : {Limit{"tensorwise", 4096, 1024, false},
                             {"tensorwise", 4096, 1040, true},
                             {"tensorwise", 4112, 1024, true},
                             {"rowwise", 8192, 2048, false},
                             {"rowwise", 1024, 8192, false},
                             {"rowwise", 2048, 4096, false},
                             {"rowwise", 2064, 4096, true},
                             {"rowwise", 2048, 4112, true}}) {
    nn::ModuleList<nn::Linear> layers;
    layers.push_back(
        nn::Linear(limit.in, limit.out, nn::LinearOptions{.construct = deferred(at::kMeta, at::kFloat)}));
    const auto choices =
        convert(*layers.ptr(), with({.recipe_name = limit.recipe, .filter_fqns = {kAutoFilter}}));
    EXPECT_EQ(converted(choices), limit.gains) << limit.recipe << " " << limit.in << " to " << limit.out;
  }
}

TEST(Convert, RefusesTheAutoFilterForRecipesWithoutThresholds) {
  EXPECT_THROW(check_filters("rowwise_with_gw_hp", {kAutoFilter}), ConfigError);
  EXPECT_THROW(check_filters("tensorwide", {}), ConfigError);
  EXPECT_NO_THROW(check_filters("rowwise_with_gw_hp", {"output"}));
}

}  // namespace
}  // namespace titan::float8
