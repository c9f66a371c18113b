// MXFP8's casts, outputs and gradients equal torchao's (tests/data/golden/mxfp8.safetensors).

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "float8/cast.h"
#include "float8/products.h"
#include "titan/ops/linear.h"
#include "unit/golden.h"

namespace titan::float8 {
namespace {

using ops::Operand;
using testing::relative_error;

const SafetensorsFile& mx_golden() {
  static const SafetensorsFile file(std::filesystem::path(TITAN_SOURCE_DIR) /
                                    "tests/data/golden/mxfp8.safetensors");
  return file;
}

std::shared_ptr<const ops::Products> mx_products(const Recipe& recipe) {
  return products(recipe, Arithmetic::Emulated, ops::default_products());
}

struct MxCase {
  std::string inputs, recipe;
};

struct Mxfp8Test : ::testing::TestWithParam<MxCase> {
  at::Tensor given(const std::string& name) const {
    return mx_golden().tensor(GetParam().inputs + "." + name).clone();
  }
  at::Tensor expected(const std::string& name) const { return given(GetParam().recipe + "." + name); }

  // If a block isn't finite, our values are NaN, independent of the data. torchao's are NaN only for a NaN.
  void expect_cast(const ops::ScaledMatrix& ours, const std::string& name) const {
    const at::Tensor data = expected(name + ".data"), scale = expected(name + ".scale");
    const at::Tensor our_scale = ours.scale.view(at::kByte), infinite = our_scale.eq(255);
    ASSERT_EQ(our_scale.sizes(), scale.sizes()) << name;
    EXPECT_TRUE(at::equal(our_scale.masked_fill(infinite, 0), scale.masked_fill(infinite, 0))) << name;
    EXPECT_TRUE(scale.eq(255).logical_and(infinite.logical_not()).logical_not().all().item<bool>()) << name;
    const at::Tensor left_out = infinite.unsqueeze(2).expand({-1, -1, kBlock}).reshape(data.sizes());
    EXPECT_TRUE(at::equal(ours.data.view(at::kByte).masked_fill(left_out, 0), data.masked_fill(left_out, 0)))
        << name;
    if (GetParam().inputs != "infinity" && GetParam().inputs != "nan")
      EXPECT_FALSE(infinite.any().item<bool>()) << name;
  }
  // If torchao's value isn't finite, ours isn't either. Ours may be NaN where torchao turned an infinity into
  // a number.
  void expect_near(const at::Tensor& ours, const at::Tensor& theirs, const std::string& name) const {
    ASSERT_EQ(ours.sizes(), theirs.sizes());
    EXPECT_EQ(ours.scalar_type(), theirs.scalar_type());
    const at::Tensor finite = at::isfinite(ours);
    EXPECT_TRUE(finite.logical_and(at::isfinite(theirs).logical_not()).logical_not().all().item<bool>())
        << name;
    if (GetParam().inputs != "infinity") EXPECT_TRUE(at::equal(finite, at::isfinite(theirs))) << name;
    const double rounding = theirs.scalar_type() == at::kFloat ? 2e-6 : 4e-3;
    EXPECT_LT(relative_error(ours.masked_select(finite), theirs.masked_select(finite)), rounding) << name;
  }

  std::shared_ptr<const ops::Products> scaled = mx_products(recipes().get(GetParam().recipe));
};

TEST_P(Mxfp8Test, CastsAreBitEqual) {
  const at::Tensor weight = given("weight");
  const Operand x = scaled->input(given("x"), /*trains=*/true),
                grad = scaled->grad(given("grad"), true, true);
  expect_cast(x.along_rows, "output.x");
  expect_cast(scaled->kept(x).down_columns, "grad_weight.x");
  expect_cast(grad.along_rows, "grad_input.grad");
  expect_cast(grad.down_columns, "grad_weight.grad");
  const BlockRounding rounding = recipes().get(GetParam().recipe).blocks.rounding;
  expect_cast(cast_blocks(weight, {.rounding = rounding}), "output.weight");
  expect_cast(cast_blocks(weight, {.rounding = rounding, .transposed = true}), "grad_input.weight");
}

TEST_P(Mxfp8Test, OutputsAndGradientsAreWithinRounding) {
  const at::Tensor x = given("x").requires_grad_(), weight = given("weight").requires_grad_();
  const at::Tensor y = ops::linear(x, weight, {}, scaled);
  expect_near(y.detach(), expected("output"), "output");
  y.backward(given("grad"));
  expect_near(x.grad(), expected("grad_x"), "grad_x");
  expect_near(weight.grad(), expected("grad_weight"), "grad_weight");
}

INSTANTIATE_TEST_SUITE_P(All, Mxfp8Test, ::testing::ValuesIn([] {
                           std::vector<MxCase> cases;
                           for (const char* inputs : {"bf16", "fp32", "padding", "zeros", "infinity", "nan",
                                                      "denormal", "outlier", "extreme", "edges"})
                             for (const char* recipe : {"mxfp8_cublas", "mxfp8_cublas_rceil"})
                               cases.push_back({inputs, recipe});
                           return cases;
                         }()),
                         [](const auto& info) { return info.param.inputs + "_" + info.param.recipe; });

TEST(Mxfp8, ScalesAreLaidOutForTheHardware) {
  for (const std::string name : {"layout.128x4", "layout.200x3", "layout.300x10"}) {
    const at::Tensor plain = mx_golden().tensor(name + ".plain").clone();
    const at::Tensor ours = blocked_layout(plain.view(at::kFloat8_e8m0fnu)).view(at::kByte);
    EXPECT_TRUE(at::equal(ours, mx_golden().tensor(name + ".blocked"))) << name;
  }
}

TEST(Mxfp8, ComposedColumnCastsGiveTheSameBits) {
  Recipe composed = recipes().get("mxfp8_cublas");
  composed.blocks.composed_columns = true;
  const at::Tensor x = at::randn({50, 64}, at::kBFloat16);
  const auto ours = mx_products(recipes().get("mxfp8_cublas"))->kept(x).down_columns;
  const auto theirs = mx_products(composed)->kept(x).down_columns;
  EXPECT_TRUE(at::equal(ours.data.view(at::kByte), theirs.data.view(at::kByte)));
  EXPECT_TRUE(at::equal(ours.scale.view(at::kByte), theirs.scale.view(at::kByte)));
}

TEST(Mxfp8, KeepsOneByteForEachElementAndEachBlock) {
  const auto scaled = mx_products(recipes().get("mxfp8_cublas"));
  const Operand kept = scaled->kept(scaled->input(at::randn({64, 96}, at::kBFloat16), true));
  EXPECT_FALSE(kept.values.defined());
  EXPECT_FALSE(kept.along_rows.defined());
  EXPECT_EQ(kept.down_columns.data.storage().nbytes() + kept.down_columns.scale.storage().nbytes(),
            64U * 96 + 64U * 96 / kBlock);
}

struct FourRanks final : ops::RankParts {
  int index() const override { return 0; }
  int count() const override { return 4; }
  void all_gather(const at::Tensor& /*out*/, const at::Tensor& /*in*/, const char* /*phase*/) const override {
    FAIL() << "blocks need no data from other ranks";
  }
};

TEST(Mxfp8, RefusesPartsThatCutBlocks) {
  const auto scaled =
      mx_products(recipes().get("mxfp8_cublas"))->for_parts({.in = std::make_shared<FourRanks>()});
  EXPECT_NO_THROW(scaled->input(at::randn({8, 64}), true));
  try {
    scaled->input(at::randn({8, 48}), true);
    FAIL() << "48 features aren't whole blocks";
  } catch (const ConfigError& error) {
    EXPECT_NE(error.problems().front().find("4 ranks gives a rank 48"), std::string::npos) << error.what();
  }
}

TEST(Mxfp8, RefusesRecipesThatMixBlocksWithOtherScales) {
  Recipe recipe = recipes().get("mxfp8_cublas");
  recipe.output->right.granularity = Granularity::Vector;
  EXPECT_THROW(check("mixed", recipe), ConfigError);
  EXPECT_FALSE(scales_blocks(recipes().get("rowwise")));
  EXPECT_TRUE(scales_blocks(recipes().get("mxfp8_emulated")));
}

}  // namespace
}  // namespace titan::float8
