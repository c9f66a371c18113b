#include "checkpoint/peer/free_memory.h"

#include <gtest/gtest.h>

namespace titan::checkpoint::detail {
namespace {

TEST(MemoryNeeds, AddUpForProcessesThatShareALimit) {
  const auto need = [](int64_t bytes, const std::string& group, int64_t left) {
    return MemoryNeed{bytes, {{"host", "this host", 100}, {group, "group " + group, left}}};
  };
  EXPECT_FALSE(tightest({}));
  EXPECT_FALSE(tightest({{10, {}}}));

  const auto apart = tightest({need(30, "a", 45), need(30, "b", 45)});
  ASSERT_TRUE(apart);
  EXPECT_EQ(apart->limit.free_bytes - apart->wanted_bytes, 15) << "each has its own group";
  const auto together = tightest({need(30, "a", 45), need(30, "a", 44)});
  EXPECT_EQ(together->limit.name, "group a");
  EXPECT_EQ(together->wanted_bytes, 60);
  EXPECT_EQ(together->limit.free_bytes, 44) << "the smallest reported amount counts";
  const auto host = tightest({need(60, "a", 100), need(60, "b", 100)});
  EXPECT_EQ(host->limit.name, "this host");
  EXPECT_EQ(host->wanted_bytes, 120);
}

}  // namespace
}  // namespace titan::checkpoint::detail
