#include "checkpoint/save/save_plan.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace titan::checkpoint::detail {
namespace {

// For every start and end within a cache line, copies the range and nothing around it.
TEST(StreamingCopy, CopiesExactlyTheRange) {
  constexpr size_t line = 64, most = 4 * line;
  std::vector<char> source(most + line);
  std::iota(source.begin(), source.end(), char{1});
  for (size_t from = 0; from < line; from += 7)
    for (size_t to = 0; to < line; ++to)
      for (size_t num_bytes = 0; num_bytes + line <= most; num_bytes += num_bytes < 2 * line ? 1 : 13) {
        std::vector<char> target(most + line, 'x'), expected = target;
        std::copy_n(source.begin() + static_cast<int64_t>(from), num_bytes,
                    expected.begin() + static_cast<int64_t>(to));
        streaming_copy(target.data() + to, source.data() + from, num_bytes);
        ASSERT_EQ(target, expected) << num_bytes << " bytes from " << from << " to " << to;
      }
}

}  // namespace
}  // namespace titan::checkpoint::detail
