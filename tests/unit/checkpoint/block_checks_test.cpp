#include "checkpoint/format/rank_file.h"

#include <cmath>
#include <limits>

#include <gtest/gtest.h>

#include "unit/checkpoint/rank_file_support.h"

namespace titan::checkpoint {
namespace {

using namespace testing;

std::span<const std::byte> bytes_of(const at::Tensor& tensor) {
  return {static_cast<const std::byte*>(tensor.const_data_ptr()), tensor.nbytes()};
}

bool finite(const at::Tensor& tensor) { return detail::all_finite(bytes_of(tensor), tensor.scalar_type()); }

TEST(BlockChecks, ChecksumIsXxh3) {
  // The reference implementation's value for the empty string.
  EXPECT_EQ(detail::checksum_of({}), 0x2d06800538d394c2u);
  EXPECT_NE(detail::checksum_of(bytes_of(at::zeros({1}))), detail::checksum_of(bytes_of(at::zeros({2}))));
}

TEST(BlockChecks, CountsBlocks) {
  EXPECT_EQ(detail::num_blocks(0), 0);
  EXPECT_EQ(detail::num_blocks(1), 1);
  EXPECT_EQ(detail::num_blocks(kBlockBytes), 1);
  EXPECT_EQ(detail::num_blocks(kBlockBytes + 1), 2);
  EXPECT_EQ(detail::num_blocks(std::numeric_limits<int64_t>::max()), int64_t{1} << 43);
}

TEST(BlockChecks, FindsNonFiniteElementsOfEachDtypeAtEachPosition) {
  const double inf = std::numeric_limits<double>::infinity(), nan = std::numeric_limits<double>::quiet_NaN();
  for (auto dtype :
       {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kFloat8_e5m2, at::kFloat8_e4m3fn}) {
    const at::Tensor clean = sample(dtype, {67});  // not a multiple of a vector's length
    ASSERT_TRUE(finite(clean)) << dtype;
    for (int64_t position = 0; position < 67; ++position) {
      for (double value : {nan, inf, -inf}) {
        if (dtype == at::kFloat8_e4m3fn && std::isinf(value)) continue;  // has no infinities
        at::Tensor spoiled = clean.clone();
        spoiled[position] = at::scalar_tensor(value).to(dtype);
        EXPECT_FALSE(finite(spoiled)) << dtype << " " << value << " at " << position;
      }
    }
  }
}

TEST(BlockChecks, AgreesWithTorchOnEveryShortFloat) {
  for (auto dtype : {at::kHalf, at::kBFloat16, at::kFloat8_e5m2, at::kFloat8_e4m3fn}) {
    const bool one_byte = c10::elementSize(dtype) == 1;
    const at::Tensor patterns =
        at::arange(one_byte ? 256 : 65536, at::kInt).to(one_byte ? at::kByte : at::kShort);
    const at::Tensor values = patterns.view(dtype), expected = values.to(at::kFloat).isfinite();
    const auto size = c10::elementSize(dtype);
    for (int64_t i = 0; i < values.numel(); ++i) {
      const auto element = bytes_of(values).subspan(static_cast<size_t>(i) * size, size);
      ASSERT_EQ(detail::all_finite(element, dtype), expected.const_data_ptr<bool>()[i]) << dtype << " " << i;
    }
  }
}

TEST(BlockChecks, LargestNumbersAreFinite) {
  EXPECT_TRUE(finite(at::full({3}, std::numeric_limits<double>::max(), at::kDouble)));
  EXPECT_TRUE(finite(at::full({3}, -std::numeric_limits<float>::max(), at::kFloat)));
  EXPECT_TRUE(finite(at::full({3}, std::numeric_limits<double>::denorm_min(), at::kDouble)));
  EXPECT_TRUE(finite(at::full({3}, -1, at::kLong)));  // all bits set, but not a float
}

}  // namespace
}  // namespace titan::checkpoint
