// Block casts equal their composition of LibTorch's operations, and their values follow the MXFP8 format.

#include "float8/cast.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "titan/core/error.h"

namespace titan::float8 {
namespace {

at::Tensor raw_bytes(const at::Tensor& x) { return x.view(at::kByte); }

struct BlockForm {
  at::ScalarType from, to;
  bool round_up, transposed;
};

struct BlockCastTest : ::testing::TestWithParam<BlockForm> {
  ops::ScaledMatrix cast(const at::Tensor& x, bool composed = false) const {
    return cast_blocks(x, {.dtype = GetParam().to,
                           .rounding = GetParam().round_up ? BlockRounding::Up : BlockRounding::Down,
                           .transposed = GetParam().transposed,
                           .composed = composed});
  }
  void expect_equals_composition(const at::Tensor& x) const {
    const auto ours = cast(x), composed = cast(x, /*composed=*/true);
    ASSERT_EQ(ours.data.sizes(), composed.data.sizes());
    ASSERT_EQ(ours.scale.sizes(), composed.scale.sizes());
    EXPECT_TRUE(at::equal(raw_bytes(ours.scale), raw_bytes(composed.scale))) << x.sizes();
    EXPECT_TRUE(at::equal(raw_bytes(ours.data), raw_bytes(composed.data))) << x.sizes();
  }
};

// Whole and partial blocks and tiles, with magnitudes from denormals to infinities.
TEST_P(BlockCastTest, EqualsTheComposition) {
  at::manual_seed(1);
  for (const auto& [rows, columns] : std::vector<std::pair<int64_t, int64_t>>{
           {64, 128}, {1, 1}, {33, 31}, {70, 100}, {32, 65}, {129, 32}}) {
    const at::Tensor exponents = at::randint(-40, 40, {rows, columns});
    const at::Tensor wide = at::randn({rows, columns}) * at::pow(2.0, exponents);
    expect_equals_composition(wide.to(GetParam().from));
  }
}

TEST_P(BlockCastTest, EqualsTheCompositionAtTheEndsOfTheRange) {
  at::Tensor x = at::randn({64, 64});
  x[0][0] = INFINITY;
  x[1][40] = -NAN;
  x[40][1] = 3.4e38;
  x.narrow(0, 32, 8).mul_(1e-38);
  x.narrow(1, 33, 5).mul_(1e-44);
  x.narrow(0, 8, 4).zero_();
  expect_equals_composition(x.to(GetParam().from));
}

// The error is at most rounding (half of the last bit) or saturation.
TEST_P(BlockCastTest, ValuesAreWithinRounding) {
  at::manual_seed(2);
  const at::Tensor x = at::randn({40, 72}).to(GetParam().from);
  const at::Tensor wanted = (GetParam().transposed ? x.t() : x).to(at::kFloat);
  const at::Tensor values = block_values(cast(x));
  const int64_t elements = wanted.size(1);
  EXPECT_EQ(values.size(1), (elements + kBlock - 1) / kBlock * kBlock);
  EXPECT_TRUE(at::equal(values.narrow(1, elements, values.size(1) - elements),
                        at::zeros({values.size(0), values.size(1) - elements})));
  const at::Tensor error = (values.narrow(1, 0, elements) - wanted).abs();
  const double step = GetParam().to == at::kFloat8_e4m3fn ? 1.0 / 16 : 1.0 / 8;
  const double saturated = GetParam().round_up ? 0 : step;
  const at::Tensor smallest = at::full({}, wanted.abs().max().item<double>() / 1e4);
  EXPECT_TRUE((error <= (step + saturated) * wanted.abs() + smallest).all().item<bool>());
}

INSTANTIATE_TEST_SUITE_P(All, BlockCastTest, ::testing::ValuesIn([] {
                           std::vector<BlockForm> forms;
                           for (const at::ScalarType from : {at::kFloat, at::kBFloat16})
                             for (const at::ScalarType to : {at::kFloat8_e4m3fn, at::kFloat8_e5m2})
                               for (const bool round_up : {false, true})
                                 for (const bool transposed : {false, true})
                                   forms.push_back({from, to, round_up, transposed});
                           return forms;
                         }()),
                         [](const auto& info) {
                           const BlockForm& form = info.param;
                           return titan::str(form.from, "_", form.to, form.round_up ? "_up" : "_down",
                                             form.transposed ? "_columns" : "_rows");
                         });

// If one element isn't finite, its whole block is NaN, but no other block is.
TEST(BlockCast, ABlockWithANanOrAnInfinityIsNan) {
  for (const double bad : {double{INFINITY}, -double{INFINITY}, double{NAN}})
    for (const BlockRounding rounding : {BlockRounding::Down, BlockRounding::Up}) {
      at::Tensor x = at::ones({2, 64});
      x[1][40] = bad;
      const at::Tensor values = block_values(cast_blocks(x, {.rounding = rounding}));
      EXPECT_TRUE(at::isnan(values[1].narrow(0, 32, 32)).all().item<bool>()) << bad;
      EXPECT_EQ(at::isnan(values).sum().item<int64_t>(), 32) << bad;
    }
}

TEST(BlockCast, AcceptsOtherDtypesAndStrides) {
  const at::Tensor x = at::randn({64, 96});
  const auto wanted = cast_blocks(x, {});
  EXPECT_TRUE(at::equal(raw_bytes(cast_blocks(x.to(at::kDouble), {}).data), raw_bytes(wanted.data)));
  EXPECT_TRUE(at::equal(raw_bytes(cast_blocks(x.t().contiguous().t(), {}).data), raw_bytes(wanted.data)));
  EXPECT_EQ(cast_blocks(x.to(at::kMeta), {.transposed = true}).data.sizes(), (std::vector<int64_t>{96, 64}));
  const BothCasts shapes = cast_blocks_both(x.to(at::kMeta), {}), both = cast_blocks_both(x, {});
  for (const auto of : {&BothCasts::along_rows, &BothCasts::down_columns}) {
    EXPECT_EQ((shapes.*of).data.sizes(), (both.*of).data.sizes());
    EXPECT_EQ((shapes.*of).scale.sizes(), (both.*of).scale.sizes());
  }
}

TEST(BlockCast, RefusesBadDtypesAndShapes) {
  EXPECT_THROW(cast_blocks(at::ones({2, 2}), {.dtype = at::kHalf}), Error);
  EXPECT_THROW(cast_blocks(at::ones({0, 2}), {}), Error);
  EXPECT_THROW(cast_blocks(at::ones({2}), {}), Error);
}

}  // namespace
}  // namespace titan::float8
