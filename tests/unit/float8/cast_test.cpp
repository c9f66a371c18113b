#include "float8/cast.h"

#include <limits>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "titan/core/error.h"

namespace titan::float8 {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Treats all NaNs as equal, because for a product of two NaNs LibTorch's loops keep the sign of either.
at::Tensor bytes(const at::Tensor& tensor) {
  const at::Tensor is_nan = at::isnan(tensor.to(at::kFloat));
  return tensor.contiguous().view(at::kByte).masked_fill(is_nan, 0x7f);
}

struct Case {
  at::ScalarType from, to;
  int64_t rows, columns;
};

struct CastTest : ::testing::TestWithParam<Case> {
  at::ScalarType to = GetParam().to;

  // Every kind of number: denormal, normal, out of range, not finite.
  at::Tensor matrix(bool finite) const {
    const at::Tensor exponents = at::randint(-140, 120, {GetParam().rows, GetParam().columns});
    at::Tensor x = at::randn(exponents.sizes()) * at::exp2(exponents.to(at::kFloat) * (finite ? 0.1 : 1));
    if (!finite) {
      x.view(-1)[0] = kNan;
      x.view(-1)[x.numel() / 2] = -kInfinity;
      x.view(-1)[x.numel() - 1] = -kNan;
    }
    return x.to(GetParam().from);
  }
  void expect_cast(const at::Tensor& x, const at::Tensor& scale, bool transposed) const {
    const at::Tensor ours = cast(x, scale, to, transposed),
                     theirs = composite::cast(x, scale, to, transposed);
    ASSERT_EQ(ours.sizes(), theirs.sizes());
    EXPECT_TRUE(ours.is_contiguous());
    EXPECT_TRUE(at::equal(bytes(ours), bytes(theirs))) << "transposed: " << transposed;
  }
};

TEST_P(CastTest, EqualsTheCompositionBitForBit) {
  for (const bool finite : {true, false}) {
    const at::Tensor x = matrix(finite);
    for (const float scale : {1.0f, 37.25f, 1e-30f, 4.48e14f, 0.0f, kNan})
      for (const bool transposed : {false, true}) expect_cast(x, at::tensor(scale), transposed);
    expect_cast(x, at::rand({x.size(0), 1}) + 0.1, false);
    expect_cast(x, at::rand({x.size(1), 1}) + 0.1, true);
  }
}

TEST_P(CastTest, AmaxEqualsTheCompositionBitForBit) {
  for (const bool finite : {true, false}) {
    const at::Tensor x = matrix(finite);
    const auto expect = [&](Over over, std::optional<int64_t> dim) {
      const at::Tensor ours = amax(x, over), theirs = composite::amax(x, dim);
      ASSERT_EQ(ours.sizes(), theirs.sizes());
      EXPECT_TRUE(at::equal(at::isnan(ours), at::isnan(theirs)));
      EXPECT_TRUE(at::equal(ours.nan_to_num(-1), theirs.nan_to_num(-1)));
    };
    expect(Over::Matrix, std::nullopt);
    expect(Over::Row, 1);
    expect(Over::Column, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, CastTest, ::testing::ValuesIn([] {
      std::vector<Case> cases;
      for (const auto from : {at::kFloat, at::kBFloat16, at::kHalf})
        for (const auto to : {at::kFloat8_e4m3fn, at::kFloat8_e5m2})
          for (const auto& [rows, columns] : {std::pair{1, 1}, {3, 130}, {19, 33}, {64, 256}, {129, 40}})
            cases.push_back({from, to, rows, columns});
      return cases;
    }()));

// All numbers of a format, all midpoints between two, and the midpoints' neighbors.
TEST(Cast, RoundsTiesToEven) {
  for (const at::ScalarType to : {at::kFloat8_e4m3fn, at::kFloat8_e5m2}) {
    const at::Tensor all = at::arange(256).to(at::kByte).view(to).to(at::kFloat);
    const at::Tensor finite = std::get<0>(all.masked_select(all.isfinite()).sort());
    const at::Tensor middle = (finite.slice(0, 1) + finite.slice(0, 0, -1)) / 2;
    const at::Tensor x = at::cat({finite, middle, at::nextafter(middle, at::tensor(kInfinity)),
                                  at::nextafter(middle, at::tensor(-kInfinity))})
                             .unsqueeze(0);
    const at::Tensor one = at::ones({});
    EXPECT_TRUE(at::equal(bytes(cast(x, one, to, false)), bytes(x.to(to))));
  }
}

TEST(Cast, ClampsValuesToTheRange) {
  const at::Tensor x = at::tensor({1e6f, -1e6f, kInfinity, -kInfinity}).unsqueeze(0);
  const at::Tensor held = cast(x, at::ones({}), at::kFloat8_e4m3fn, false).to(at::kFloat);
  EXPECT_TRUE(at::equal(held, at::tensor({448.f, -448.f, 448.f, -448.f}).unsqueeze(0)));
}

TEST(Scale, EqualsTheCompositionBitForBit) {
  const at::Tensor amaxes =
      at::cat({at::rand({1000}) * 10, at::tensor({0.f, 1e-45f, 1e-12f, 1.75f, 3.4e38f, kInfinity, kNan})});
  for (const at::ScalarType to : {at::kFloat8_e4m3fn, at::kFloat8_e5m2})
    for (const bool power_of_two : {false, true}) {
      const at::Tensor ours = scale_of(amaxes, to, power_of_two),
                       theirs = composite::scale_of(amaxes, to, power_of_two);
      EXPECT_TRUE(at::equal(ours.nan_to_num(-1), theirs.nan_to_num(-1)));
      EXPECT_TRUE(at::equal(at::isnan(ours), at::isnan(theirs)));
    }
}

TEST(Scale, PowersOfTwoAreRoundedDown) {
  const at::Tensor scale = scale_of(at::tensor({1.75f, 2.f, 448.f, 449.f}), at::kFloat8_e4m3fn, true);
  EXPECT_TRUE(at::equal(scale, at::tensor({256.f, 128.f, 1.f, 0.5f})));
}

TEST(Cast, RefusesBadDtypesAndShapes) {
  EXPECT_THROW(amax(at::zeros({0, 4}), Over::Matrix), Error);
  EXPECT_THROW(cast(at::zeros({3, 4}), at::ones({4}), at::kFloat8_e4m3fn, false), Error);
  EXPECT_THROW(cast(at::zeros({3, 4}), at::ones({}), at::kHalf, false), Error);
}

TEST(Cast, KnowsSizesWithoutData) {
  const at::Tensor x = at::empty({6, 4}, at::TensorOptions(at::kMeta));
  EXPECT_EQ(amax(x, Over::Column).sizes(), at::IntArrayRef({4, 1}));
  const at::Tensor scaled =
      cast(x, scale_of(amax(x, Over::Column), at::kFloat8_e5m2, true), at::kFloat8_e5m2, true);
  EXPECT_EQ(scaled.sizes(), at::IntArrayRef({4, 6}));
  EXPECT_EQ(scaled.scalar_type(), at::kFloat8_e5m2);
}

TEST(AmaxOfMany, EqualsTheAmaxOfEachTensor) {
  at::manual_seed(5);
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
    std::vector<at::Tensor> xs;
    for (const int64_t size : {1, 7, 65536, 65537, 200000}) xs.push_back(at::randn({size}).to(dtype));
    xs.push_back(at::randn({40, 30}).to(dtype).t());
    xs.push_back(at::zeros({3}, dtype));
    xs[3][65536] = NAN;
    xs[4][100000] = -INFINITY;
    for (size_t count : {size_t{5}, xs.size()}) {
      const at::Tensor many = amax_many(at::TensorList(xs.data(), count));
      ASSERT_EQ(many.numel(), static_cast<int64_t>(count));
      for (size_t i = 0; i < count; ++i) {
        const at::Tensor wanted = xs[i].abs().max().to(at::kFloat);
        EXPECT_TRUE(at::equal(many[static_cast<int64_t>(i)].nan_to_num(-1, -2), wanted.nan_to_num(-1, -2)))
            << dtype << " " << i;
      }
    }
  }
  EXPECT_THROW(amax_many({}), Error);
  EXPECT_THROW(amax_many({at::ones({2}), at::ones({0})}), Error);
}

}  // namespace
}  // namespace titan::float8
