// Delayed scales equal a reference in Python (tests/data/golden/delayed_scaling.safetensors) and work in
// layers.

#include "float8/products.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "float8/cast.h"
#include "titan/core/error.h"
#include "titan/models/llama3.h"
#include "titan/nn/layers.h"
#include "unit/golden.h"

namespace titan::float8 {
namespace {

const SafetensorsFile& delayed_golden() {
  static const SafetensorsFile file(std::filesystem::path(TITAN_SOURCE_DIR) /
                                    "tests/data/golden/delayed_scaling.safetensors");
  return file;
}

void keep_of_one_rank(const at::Tensor& /*pending*/) {}

Recipe delaying(bool input, bool weight, bool grad_output, int64_t history_len = 4) {
  Recipe recipe = recipes().get("tensorwise");
  recipe.delayed = {input, weight, grad_output, history_len};
  return recipe;
}

// One linear layer with products of `recipe`, and its collected scales.
struct Layer {
  explicit Layer(const Recipe& recipe) {
    list.push_back(linear);
    linear->set_products(products(recipe, Arithmetic::Emulated, ops::default_products()));
    scales = DelayedScales::collect({list.ptr().get()}, recipe.delayed.history_len, at::kCPU);
  }
  const ops::Products& of() { return *linear->products(); }
  nn::Linear linear = [] {
    at::manual_seed(3);
    return nn::Linear(8, 8);
  }();
  nn::ModuleList<nn::Linear> list;
  DelayedScales scales = DelayedScales::collect({}, 1, at::kCPU);
};

struct DelayedGolden : ::testing::TestWithParam<std::string> {};

// Casts through a layer's input (e4m3), or through its output's gradient (e5m2).
TEST_P(DelayedGolden, ScalesCastsAndHistoriesAreBitEqual) {
  const std::string name = GetParam();
  const bool grad = name == "e5m2";
  at::Tensor x = delayed_golden().tensor("x").clone();
  if (name == "zeros") x.zero_();
  const at::Tensor scale = delayed_golden().tensor(name + ".scale"),
                   history = delayed_golden().tensor(name + ".history"),
                   data = delayed_golden().tensor(name + ".data");
  Layer layer(delaying(!grad, false, grad, history.size(1)));
  for (int64_t step = 0; step < x.size(0); ++step) {
    for (int64_t i = 0; i < x.size(1); ++i) {
      const at::Tensor matrix = x[step][i].contiguous();
      const auto cast =
          grad ? layer.of().grad(matrix, true, true).along_rows : layer.of().input(matrix, true).along_rows;
      EXPECT_TRUE(at::equal(cast.scale.isnan(), scale[step][i].isnan())) << step << " " << i;
      EXPECT_TRUE(at::equal(cast.scale.nan_to_num(-1), scale[step][i].nan_to_num(-1))) << step << " " << i;
      if (scale[step][i].isnan().item<bool>()) continue;  // so are all its values
      EXPECT_TRUE(at::equal(cast.data.view(at::kByte), data[step][i])) << step << " " << i;
    }
    layer.scales.update(keep_of_one_rank);
    EXPECT_TRUE(at::equal(layer.scales.history(0)[grad ? 2 : 0], history[step])) << step;
  }
}

INSTANTIATE_TEST_SUITE_P(All, DelayedGolden, ::testing::Values("e4m3", "e5m2", "zeros"),
                         [](const auto& info) { return info.param; });

TEST(DelayedScales, KernelsEqualTheComposition) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float amax : {0.0F, 1e-20F, 0.3F, 448.0F, 3e38F, infinity, std::nanf("")})
    for (const float largest : {0.0F, 2.5F})
      for (const bool flag : {false, true}) {
        std::vector<at::Tensor> results;
        for (const bool composed : {false, true}) {
          const at::Tensor mine = at::full({}, amax), pending = at::full({}, 0.2F),
                           history = at::full({}, largest);
          results.push_back(
              composed ? composite::delayed_scale(mine, pending, history, at::kFloat8_e5m2, flag, flag)
                       : delayed_scale(mine, {history, pending}, at::kFloat8_e5m2, flag, flag));
          results.push_back(pending);
        }
        EXPECT_TRUE(at::equal(results[0].nan_to_num(-1), results[2].nan_to_num(-1)))
            << amax << " " << largest;
        EXPECT_TRUE(at::equal(results[1], results[3])) << amax << " " << largest;
      }
}

TEST(DelayedScales, TheFirstStepIsDynamic) {
  const at::Tensor x = at::randn({16, 8}).requires_grad_(), grad = at::randn({16, 8});
  Layer delayed(delaying(true, true, true)), dynamic(recipes().get("tensorwise"));
  std::vector<at::Tensor> results;
  for (Layer* layer : {&delayed, &dynamic}) {
    const at::Tensor y = layer->linear(x);
    y.backward(grad);
    results.insert(results.end(), {y.detach(), x.grad().clone(), layer->linear->weight.grad()});
    x.mutable_grad().reset();
  }
  for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(at::equal(results[i], results[i + 3])) << i;
}

// A magnitude on another rank determines this rank's scale in the next step.
TEST(DelayedScales, UseTheMagnitudesOfAllRanks) {
  Layer layer(delaying(true, false, false));
  layer.of().input(at::ones({2, 8}), true);
  layer.scales.update([](const at::Tensor& pending) { pending.mul_(7); });
  const auto cast = layer.of().input(at::ones({2, 8}), true).along_rows;
  EXPECT_EQ(cast.scale.item<float>(), 448.0F / 7);
}

TEST(DelayedScales, DoNotRecordValidation) {
  Layer layer(delaying(true, false, false));
  layer.of().input(at::ones({2, 8}), /*trains=*/true);
  layer.of().input(at::full({2, 8}, 100.0), /*trains=*/false);
  layer.scales.update(keep_of_one_rank);
  EXPECT_EQ(layer.scales.history(0)[0][0].item<float>(), 1.0F);
}

// Otherwise ranks that share its matrices would have different scales in every step.
TEST(DelayedScales, RecordAFrozenLayersInput) {
  Layer layer(delaying(true, false, false));
  layer.linear->weight.set_requires_grad(false);
  {
    const at::NoGradGuard validating;
    layer.linear(at::full({2, 8}, 100.0));
  }
  layer.linear(at::full({2, 8}, 3.0));
  layer.scales.update(keep_of_one_rank);
  EXPECT_EQ(layer.scales.history(0)[0][0].item<float>(), 3.0F);
}

TEST(DelayedScales, ContinueFromLoadedHistories) {
  Layer before(delaying(true, true, true)), after(delaying(true, true, true));
  const at::Tensor x = at::randn({16, 8});
  before.linear(x).sum().backward();
  before.scales.update(keep_of_one_rank);
  after.scales.history(0).copy_(before.scales.history(0));
  after.scales.loaded();
  const at::Tensor other = at::randn({16, 8}) * 3;
  EXPECT_TRUE(at::equal(before.linear(other), after.linear(other)));
  before.linear->set_products(
      products(recipes().get("tensorwise"), Arithmetic::Emulated, ops::default_products()));
  EXPECT_FALSE(at::equal(before.linear(other), after.linear(other)));
}

TEST(DelayedScales, AreSeparateForEachLayer) {
  const models::Llama3 model(
      models::Llama3Args{.dim = 32, .n_layers = 2, .n_heads = 4, .vocab_size = 64, .multiple_of = 16},
      deferred(at::kMeta, at::kFloat));
  ConvertOptions options{.plain = ops::default_products()};
  options.delayed.input = true;
  convert(*model.ptr(), options);
  const auto scales = DelayedScales::collect({model.ptr().get()}, 16, at::kCPU);
  ASSERT_EQ(scales.layers().size(), 14u);
  EXPECT_EQ(scales.layers()[0].fqn, "layers.0.attention.wq");
  EXPECT_EQ(scales.history(13).sizes(), (std::vector<int64_t>{3, 16}));
  EXPECT_NE(scales.layers()[0].scales, scales.layers()[1].scales);
}

TEST(DelayedScales, RefuseRecipesThatScalePartsOfAMatrix) {
  EXPECT_THROW(recipe_of({.recipe_name = "rowwise", .delayed = {.weight = true}}), ConfigError);
  EXPECT_THROW(recipe_of({.recipe_name = "mxfp8_cublas", .delayed = {.input = true}}), ConfigError);
  EXPECT_THROW(products(delaying(false, true, false), Arithmetic::Emulated, ops::default_products(),
                        {.in_float8 = true}),
               Error);
}

}  // namespace
}  // namespace titan::float8
