#include "dist/node_list.h"

#include <gtest/gtest.h>

#include "titan/core/error.h"

namespace titan::dist {
namespace {

using Names = std::vector<std::string>;
using Counts = std::vector<int>;

TEST(NodeList, PlainNames) {
  EXPECT_EQ(parse_node_list("gpu1"), Names{"gpu1"});
  EXPECT_EQ(parse_node_list("gpu1,login-2.site"), (Names{"gpu1", "login-2.site"}));
  EXPECT_EQ(parse_node_list("127.0.0.1"), Names{"127.0.0.1"});
}

TEST(NodeList, RangesKeepTheirWidth) {
  EXPECT_EQ(parse_node_list("gpu[08-11]"), (Names{"gpu08", "gpu09", "gpu10", "gpu11"}));
  EXPECT_EQ(parse_node_list("n[7,9-10],m3"), (Names{"n7", "n9", "n10", "m3"}));
  EXPECT_EQ(parse_node_list("n[099-101]-ib"), (Names{"n099-ib", "n100-ib", "n101-ib"}));
}

TEST(NodeList, SeveralBracketsMultiply) {
  EXPECT_EQ(parse_node_list("r[1-2]n[01,02]"), (Names{"r1n01", "r1n02", "r2n01", "r2n02"}));
}

TEST(NodeList, Damaged) {
  for (const char* list : {"", "a,,b", "gpu[1-2", "gpu[]", "gpu[2-1]", "gpu[a-b]", "gpu[1-]"}) {
    EXPECT_THROW(parse_node_list(list), ConfigError) << list;
  }
}

TEST(TaskCounts, Repeats) {
  EXPECT_EQ(parse_task_counts("4"), Counts{4});
  EXPECT_EQ(parse_task_counts("4(x2),3"), (Counts{4, 4, 3}));
  EXPECT_THROW(parse_task_counts("4(x2"), ConfigError);
  EXPECT_THROW(parse_task_counts("x"), ConfigError);
}

}  // namespace
}  // namespace titan::dist
