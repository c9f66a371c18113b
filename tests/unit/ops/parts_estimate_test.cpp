#include "ops/parts_estimate.h"

#include <gtest/gtest.h>

namespace titan::ops {
namespace {

// bf16, and 8,192 tokens.
bool gathers_in_parts(int64_t ranks, int64_t inner, int64_t features) {
  return gains_by_parts({ranks, 8192, inner, features / ranks, 8192 / ranks * inner * 2});
}
bool scatters_in_parts(int64_t ranks, int64_t inner, int64_t features) {
  return gains_by_parts({ranks, 8192, inner / ranks, features, 8192 / ranks * features * 2});
}

// Over eight ranks, a part has 16 tiles for 132 multiprocessors in 8B's wq, 56 in its w1, 112 in 70B's w1.
TEST(PartsEstimate, SmallProductsStayWhole) {
  EXPECT_FALSE(gathers_in_parts(8, 4096, 4096));
  EXPECT_FALSE(gathers_in_parts(8, 4096, 14336));
  EXPECT_FALSE(gathers_in_parts(8, 8192, 8192));
}

TEST(PartsEstimate, LargeProductsAreCut) {
  EXPECT_TRUE(gathers_in_parts(8, 8192, 28672));
  EXPECT_TRUE(gathers_in_parts(2, 4096, 4096));
  EXPECT_TRUE(scatters_in_parts(8, 14336, 4096));
  EXPECT_TRUE(scatters_in_parts(8, 28672, 8192));
}

// w1 of 8B in Float8, for two rows of 4,096 tokens: over two ranks, eight rounds of tiles instead of seven, for a copy of 117 MB; over four,
// two in both cases; over eight, two instead of one.
TEST(PartsEstimate, PlacesWithGapsAreWrittenWhereThatCostsFewRounds) {
  const auto writes_each = [](int64_t count, int64_t ranks) {
    return gains_by_writing_each(count, 8192 / ranks, 4096, 14336 / ranks);
  };
  EXPECT_TRUE(writes_each(2, 2));
  EXPECT_TRUE(writes_each(2, 4));
  EXPECT_FALSE(writes_each(2, 8));
  EXPECT_FALSE(writes_each(32, 2));  // pieces of 128 rows
}

}  // namespace
}  // namespace titan::ops
