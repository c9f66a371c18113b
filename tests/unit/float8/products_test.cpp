// Casts, outputs and gradients equal torchao's (tests/data/golden/float8.safetensors).

#include "float8/products.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "float8/cast.h"
#include "titan/ops/functional.h"
#include "titan/ops/linear.h"
#include "unit/golden.h"

namespace titan::float8 {
namespace {

using ops::Operand;
using ops::ScaledMatrix;
using testing::relative_error;

std::shared_ptr<const ops::Products> emulated(const std::string& recipe) {
  return products(recipes().get(recipe), Arithmetic::Emulated, ops::default_products());
}

const SafetensorsFile& golden() {
  static const SafetensorsFile file(std::filesystem::path(TITAN_SOURCE_DIR) /
                                    "tests/data/golden/float8.safetensors");
  return file;
}

struct ProductCase {
  std::string inputs, recipe;
};

struct TorchaoTest : ::testing::TestWithParam<ProductCase> {
  at::Tensor given(const std::string& name) const {
    return golden().tensor(GetParam().inputs + "." + name).clone();
  }
  at::Tensor expected(const std::string& name) const { return given(GetParam().recipe + "." + name); }
  bool has(const std::string& name) const {
    return golden().contains(GetParam().inputs + "." + GetParam().recipe + "." + name);
  }

  // torchao stores columns as in the matrix.
  void expect_cast(const ScaledMatrix& ours, const std::string& name, bool down_columns) const {
    ASSERT_EQ(ours.defined(), has(name + ".data")) << name;
    if (!ours.defined()) return;
    at::Tensor data = expected(name + ".data"), scale = expected(name + ".scale");
    if (down_columns) {
      data = data.t();
      scale = scale.dim() == 2 ? scale.t() : scale;
    }
    ASSERT_EQ(ours.scale.sizes(), scale.sizes()) << name;
    EXPECT_TRUE(at::equal(ours.scale.contiguous().view(at::kInt), scale.contiguous().view(at::kInt))) << name;
    EXPECT_TRUE(at::equal(ours.data.contiguous().view(at::kByte), data)) << name;
  }
  // If one isn't finite, the other isn't either.
  void expect_near(const at::Tensor& ours, const at::Tensor& theirs, const std::string& name) const {
    ASSERT_EQ(ours.sizes(), theirs.sizes());
    EXPECT_EQ(ours.scalar_type(), theirs.scalar_type());
    const at::Tensor finite = at::isfinite(theirs);
    EXPECT_TRUE(at::equal(at::isfinite(ours), finite)) << name;
    const double rounding = theirs.scalar_type() == at::kFloat ? 2e-6 : 4e-3;
    EXPECT_LT(relative_error(ours.masked_select(finite), theirs.masked_select(finite)), rounding) << name;
  }

  std::shared_ptr<const ops::Products> scaled = emulated(GetParam().recipe);
};

TEST_P(TorchaoTest, CastsAreBitEqual) {
  const at::Tensor x = given("x"), weight = given("weight"), grad = given("grad");
  const Operand x_cast = scaled->input(x, /*trains=*/true), x_kept = scaled->kept(x_cast),
                grad_cast = scaled->grad(grad, true, true);
  expect_cast(x_cast.along_rows, "output.x", false);
  expect_cast(x_kept.down_columns, "grad_weight.x", true);
  expect_cast(scaled->weight(weight, ops::Pass::Forward).along_rows, "output.weight", false);
  expect_cast(scaled->weight(weight, ops::Pass::Backward).down_columns, "grad_input.weight", true);
  expect_cast(grad_cast.along_rows, "grad_input.grad", false);
  expect_cast(grad_cast.down_columns, "grad_weight.grad", true);
}

TEST_P(TorchaoTest, OutputsAndGradientsAreWithinRounding) {
  const at::Tensor x = given("x").requires_grad_(), weight = given("weight").requires_grad_();
  const at::Tensor y = ops::linear(x, weight, {}, scaled);
  expect_near(y, expected("output"), "output");
  y.backward(given("grad"));
  expect_near(x.grad(), expected("grad_x"), "grad_x");
  expect_near(weight.grad(), expected("grad_weight"), "grad_weight");
}

INSTANTIATE_TEST_SUITE_P(All, TorchaoTest, ::testing::ValuesIn([] {
                           std::vector<ProductCase> cases;
                           for (const char* inputs : {"bf16", "fp32", "padding", "zeros", "infinity", "nan",
                                                      "denormal", "outlier", "extreme"})
                             for (const char* recipe : {"tensorwise", "rowwise", "rowwise_with_gw_hp"})
                               cases.push_back({inputs, recipe});
                           return cases;
                         }()),
                         [](const auto& info) { return info.param.inputs + "_" + info.param.recipe; });

struct RecipeTest : ::testing::TestWithParam<std::string> {
  at::Tensor x = at::randn({2, 24, 32}, at::kBFloat16).requires_grad_();
  at::Tensor weight = (at::randn({16, 32}) * 0.05).to(at::kBFloat16).requires_grad_();
  at::Tensor grad = at::randn({2, 24, 16}, at::kBFloat16);
  std::shared_ptr<const ops::Products> scaled = emulated(GetParam());
};

// A sink that defers weight gradients, as zero-bubble schedules do.
struct LaterSink final : ops::GradSink {
  void accept(ops::WeightGrad grad) override { waiting.push_back(std::move(grad)); }
  void accept(const at::Tensor& /*grad*/, const at::Tensor& /*scale*/) override { FAIL(); }
  std::vector<ops::WeightGrad> waiting;
};

TEST_P(RecipeTest, ADeferredWeightGradientIsTheSame) {
  ops::linear(x, weight, {}, scaled).backward(grad);
  const at::Tensor at_once = weight.grad();
  const auto sink = std::make_shared<LaterSink>();
  ops::linear(x, {weight, sink}, {}, scaled).backward(grad);
  ASSERT_EQ(sink->waiting.size(), 1u);
  // It keeps one form of each matrix, the one that the product reads.
  for (const Operand* operand : {&sink->waiting[0].grad_output_NO, &sink->waiting[0].input_NI}) {
    EXPECT_FALSE(operand->along_rows.defined());
    EXPECT_NE(operand->values.defined(), operand->down_columns.defined());
  }
  EXPECT_TRUE(at::equal(sink->waiting[0].compute(), at_once));
  at::Tensor sum = at::ones(weight.sizes(), at::kFloat);
  sink->waiting[0].add_to(sum);
  EXPECT_LT(relative_error(sum - 1, at_once), 4e-3);
}

// The bias is added after the product, in high precision; its gradient is the sum of the output's rows.
TEST_P(RecipeTest, ABiasStaysInHighPrecision) {
  const at::Tensor bias = at::randn({16}, at::kBFloat16).requires_grad_();
  const at::Tensor plain = ops::linear(x, weight, {}, scaled), y = ops::linear(x, weight, bias, scaled);
  EXPECT_LT(relative_error(y, plain.to(at::kFloat) + bias.to(at::kFloat)), 4e-3);
  const auto wanted = torch::autograd::grad({plain}, {x, weight}, {grad});
  const auto found = torch::autograd::grad({y}, {x, weight, bias}, {grad});
  for (size_t i = 0; i < wanted.size(); ++i) EXPECT_TRUE(at::equal(found[i], wanted[i])) << i;
  EXPECT_LT(relative_error(found[2], at::sum(grad.to(at::kFloat), at::IntArrayRef{0, 1})), 4e-3);
}

TEST_P(RecipeTest, JointLayersEqualSeparateLayers) {
  const at::Tensor other = (at::randn({48, 32}) * 0.05).to(at::kBFloat16).requires_grad_();
  const auto joint = ops::joint_linears(x, {{weight}, {other}}, {scaled, scaled});
  EXPECT_TRUE(at::equal(joint[0], ops::linear(x, weight, {}, scaled)));
  EXPECT_TRUE(at::equal(joint[1], ops::linear(x, other, {}, scaled)));
  const at::Tensor other_grad = at::randn(joint[1].sizes(), at::kBFloat16);
  const auto grads = torch::autograd::grad({joint[0], joint[1]}, {weight, other, x}, {grad, other_grad});
  const auto of_first = torch::autograd::grad({ops::linear(x, weight, {}, scaled)}, {weight, x}, {grad});
  const auto of_second = torch::autograd::grad({ops::linear(x, other, {}, scaled)}, {other, x}, {other_grad});
  EXPECT_TRUE(at::equal(grads[0], of_first[0]));
  EXPECT_TRUE(at::equal(grads[1], of_second[0]));
  EXPECT_LT(relative_error(grads[2], of_first[1].to(at::kFloat) + of_second[1]), 1e-2);
}

INSTANTIATE_TEST_SUITE_P(All, RecipeTest, ::testing::Values("tensorwise", "rowwise", "rowwise_with_gw_hp"),
                         [](const auto& info) { return info.param; });

// LibTorch's scaled product runs on a CPU with one scale per matrix: for "tensorwise" in bf16, and for all
// recipes in fp32, which scale vectors after the product. 37 rows aren't a multiple of 16.
TEST(Float8Products, TheHardwaresProductEqualsTheEmulation) {
  const std::vector<std::pair<const char*, at::ScalarType>> cases = {{"tensorwise", at::kBFloat16},
                                                                     {"tensorwise", at::kFloat},
                                                                     {"rowwise", at::kFloat},
                                                                     {"rowwise_with_gw_hp", at::kFloat}};
  for (const auto& [recipe, dtype] : cases) {
    const at::Tensor x = at::randn({37, 32}, dtype).requires_grad_();
    const at::Tensor weight = (at::randn({16, 32}) * 0.05).to(dtype).requires_grad_();
    const at::Tensor grad = at::randn({37, 16}, dtype);
    std::vector<std::vector<at::Tensor>> results;
    for (const Arithmetic arithmetic : {Arithmetic::Emulated, Arithmetic::Hardware}) {
      const auto scaled = products(recipes().get(recipe), arithmetic, ops::default_products());
      const at::Tensor y = ops::linear(x, weight, {}, scaled);
      results.push_back(torch::autograd::grad({y}, {x, weight}, {grad}));
      results.back().push_back(y.detach());
    }
    for (size_t i = 0; i < results[0].size(); ++i)
      EXPECT_LT(relative_error(results[1][i], results[0][i]), 4e-3) << recipe << " " << dtype << " " << i;
  }
}

TEST(Float8Products, PowerOfTwoScalesCommuteWithRounding) {
  const auto by_rows = [](int64_t rows) {
    const at::Tensor values = at::randn({rows, 32}) * at::logspace(-6, 6, rows, 2).view({-1, 1});
    const at::Tensor scale = scale_of(amax(values, Over::Row), at::kFloat8_e4m3fn, /*power_of_two=*/true);
    return ops::ScaledMatrix{cast(values, scale, at::kFloat8_e4m3fn, /*transposed=*/false), scale};
  };
  const ops::ScaledMatrix a = by_rows(48), b = by_rows(16);
  const at::Tensor first = hardware_product(a, b, {.out_dtype = at::kBFloat16, .power_of_two_scales = true});
  EXPECT_TRUE(at::equal(first, hardware_product(a, b, {.out_dtype = at::kBFloat16})));
}

TEST(Float8Products, KeepsOneByteForEachElementWhereTheRecipeAllows) {
  const at::Tensor x = at::randn({32, 16}, at::kBFloat16);
  for (const char* recipe : {"tensorwise", "rowwise"}) {
    const Operand kept = emulated(recipe)->kept(emulated(recipe)->input(x, true));
    EXPECT_FALSE(kept.values.defined()) << recipe;
    EXPECT_EQ(kept.down_columns.data.nbytes(), static_cast<size_t>(x.numel())) << recipe;
  }
  const auto high = emulated("rowwise_with_gw_hp");
  EXPECT_TRUE(high->kept(high->input(x, true)).values.is_same(x));
}

// One of two ranks with halves of a matrix; it receives the other rank's magnitudes.
struct TwoParts final : ops::RankParts {
  explicit TwoParts(at::Tensor other) : other_(std::move(other)) {}
  int index() const override { return 0; }
  int count() const override { return 2; }
  void all_gather(const at::Tensor& out, const at::Tensor& in, const char* /*phase*/) const override {
    ++calls;
    out[0].copy_(in);
    out[1].copy_(other_.numel() == in.numel() ? other_.reshape(in.sizes()) : other_.expand(in.sizes()));
  }
  at::Tensor other_;
  mutable int calls = 0;
};

TEST(Float8Products, ComputesAWeightsScaleOnceForItsValues) {
  const auto parts = std::make_shared<TwoParts>(at::ones({}));
  const auto scaled = emulated("tensorwise")->for_parts({.in = parts});
  const at::Tensor weight = at::full({16, 32}, 2.0);
  const auto scale = [&](ops::Pass pass) {
    const Operand cast = scaled->weight(weight, pass);
    return (pass == ops::Pass::Forward ? cast.along_rows : cast.down_columns).scale.item<float>();
  };
  EXPECT_EQ(scale(ops::Pass::Forward), 224);
  EXPECT_EQ(scale(ops::Pass::Backward), 224);
  EXPECT_EQ(scale(ops::Pass::Forward), 224);
  EXPECT_EQ(parts->calls, 1);
  at::Tensor(weight).mul_(2);
  EXPECT_EQ(scale(ops::Pass::Backward), 112);
  EXPECT_EQ(scale(ops::Pass::Forward), 112);
  EXPECT_EQ(parts->calls, 2);
}

// SwiGLU recomputes w2's input: only its scale is kept, so the backward doesn't exchange magnitudes again.
TEST(Float8Products, ARecomputedInputKeepsItsScale) {
  const auto parts = std::make_shared<TwoParts>(at::ones({}));
  const auto scaled = emulated("tensorwise")->for_parts({.in = parts});
  const at::Tensor gate = at::randn({8, 32}).requires_grad_(), up = at::randn({8, 32}).requires_grad_(),
                   weight = at::randn({16, 32}).requires_grad_();
  const at::Tensor y = ops::linear(ops::swiglu(gate, up), weight, {}, scaled);
  EXPECT_EQ(parts->calls, 2);  // x and the weight
  const auto grads = torch::autograd::grad({y}, {gate, weight}, {at::ones_like(y)});
  EXPECT_EQ(parts->calls, 2);
  const at::Tensor x = ops::swiglu(gate, up).detach().requires_grad_();
  const at::Tensor kept = ops::linear(x, weight, {}, scaled);
  EXPECT_TRUE(at::equal(torch::autograd::grad({kept}, {weight}, {at::ones_like(y)})[0], grads[1]));
}

TEST(Float8Products, PartsHaveTheScalesOfTheWhole) {
  const at::Tensor whole = at::randn({8, 32});
  const auto halves = whole.chunk(2, 1);
  for (const char* recipe : {"tensorwise", "rowwise"}) {
    const Over over = std::string(recipe) == "rowwise" ? Over::Row : Over::Matrix;
    const auto parts = std::make_shared<TwoParts>(amax(halves[1].contiguous(), over));
    const auto scaled = emulated(recipe)->for_parts({.in = parts});
    EXPECT_TRUE(at::equal(scaled->input(halves[0], false).along_rows.scale,
                          emulated(recipe)->input(whole, false).along_rows.scale))
        << recipe;
  }
}

TEST(Recipes, RefusesUnknownNamesAndWrongRecipes) {
  EXPECT_THROW(recipes().get("rowise"), ConfigError);
  EXPECT_THROW(check("wide", {.output = ProductCasts{{at::kFloat8_e5m2}, {at::kFloat8_e5m2}}}), ConfigError);
  EXPECT_THROW(check("half", {.output = ProductCasts{{at::kHalf}, {}}}), ConfigError);
}

}  // namespace
}  // namespace titan::float8
