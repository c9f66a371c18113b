// The products of attention's blocks, with both vector sizes on any processor, because without AVX-512 the
// compiler splits wide vectors.

#include <gtest/gtest.h>

#include "ops/cpu/panels.h"

namespace titan::ops::simd {
namespace {

// Small whole numbers, whose sums are exact in any order.
std::vector<float> whole_numbers(int64_t count, int64_t period) {
  std::vector<float> values(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i)
    values[static_cast<size_t>(i)] = static_cast<float>(i * 7 % period - period / 2);
  return values;
}

template <class V, bool add>
void expect_product(int64_t rows, int64_t depth, int64_t panels, bool adjacent_rows) {
  SCOPED_TRACE(::testing::Message() << rows << " x " << depth << " by " << panels << " panels, "
                                    << (adjacent_rows ? "adjacent rows" : "adjacent columns"));
  const int64_t panel_stride = depth * kPanel + 32, c_stride = panels * kPanel + 8;
  const auto a = whole_numbers(rows * depth, 13), b = whole_numbers(panels * panel_stride, 17),
             before = whole_numbers(rows * c_stride, 11);
  const LeftFactor left{a.data(), adjacent_rows ? 1 : depth, adjacent_rows ? rows : 1};
  auto c = before;
  multiply_panels<V, add>({c.data(), c_stride}, left, {b.data(), panel_stride, panels}, rows, depth);

  auto expected = before;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < panels * kPanel; ++j) {
      float& sum = expected[static_cast<size_t>(i * c_stride + j)];
      if (!add) sum = 0;
      for (int64_t k = 0; k < depth; ++k)
        sum += left.data[i * left.row_stride + k * left.step] *
               b[static_cast<size_t>(j / kPanel * panel_stride + k * kPanel + j % kPanel)];
    }
  }
  EXPECT_EQ(c, expected);
}

template <class V>
void expect_products() {
  for (const int64_t rows : {kTileRows, 2 * kTileRows})
    for (const int64_t depth : {1, 16, 37})
      for (int64_t panels = 1; panels <= 9; ++panels)
        for (const bool adjacent_rows : {false, true}) {
          expect_product<V, false>(rows, depth, panels, adjacent_rows);
          expect_product<V, true>(rows, depth, panels, adjacent_rows);
        }
}

TEST(CpuProducts, MultiplyAnyNumberOfPanelsByNarrowVectors) { expect_products<Floats>(); }
TEST(CpuProducts, MultiplyAnyNumberOfPanelsByWideVectors) { expect_products<WideFloats>(); }

TEST(CpuProducts, PackBlocksTransposedScaledAndPaddedWithZeros) {
  const auto matrix = whole_numbers(5 * 8, 23);
  std::vector<float> packed(6 * 3, -1.0f);
  pack_blocks<2>(packed.data(), Rows<const float>{matrix.data(), 8, 5, 3}, 6, 0.5f);
  for (int64_t row = 0; row < 6; ++row)
    for (int64_t i = 0; i < 3; ++i)
      EXPECT_EQ(packed[static_cast<size_t>(row / 2 * 6 + i * 2 + row % 2)],
                row < 5 ? 0.5f * matrix[static_cast<size_t>(row * 8 + i)] : 0.0f)
          << row << ", " << i;
}

template <class V>
void expect_exponentials() {
  for (float x = -86.0f; x < 88.0f; x += 0.37f) {
    V v = broadcast<V>(0.0f);
    v[kFloatsOf<V> - 1] = x;
    const V e = exp(v);
    EXPECT_EQ(e[0], 1.0f);
    EXPECT_NEAR(e[kFloatsOf<V> - 1] / std::exp(x), 1.0f, 3e-7f) << x;
  }
}

TEST(CpuProducts, ComputeExponentialsByBothVectorSizes) {
  expect_exponentials<Floats>();
  expect_exponentials<WideFloats>();
}

}  // namespace
}  // namespace titan::ops::simd
