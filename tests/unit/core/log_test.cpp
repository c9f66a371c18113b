#include "titan/core/log.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <string>
#include <thread>
#include <vector>

namespace titan::log {
namespace {

class LogTest : public testing::Test {
 protected:
  void TearDown() override { configure({}); }

  /// The text that `action` writes to standard error.
  template <class Action>
  static std::string written_by(Action action) {
    testing::internal::CaptureStderr();
    action();
    return testing::internal::GetCapturedStderr();
  }
};

TEST_F(LogTest, WritesOneLineWithTimeLevelAndMessage) {
  std::string line = written_by([] { info("a {} message"); });
  EXPECT_TRUE(testing::internal::RE::FullMatch(
      line, testing::internal::RE("\\[titan\\] [0-9-]+ [0-9:.]+ - info - a \\{\\} message\n")))
      << line;
}

TEST_F(LogTest, ShowsTheRankIfThereAreSeveral) {
  configure({.rank = 3, .world_size = 4});
  EXPECT_NE(written_by([] { warning("m"); }).find(" - [rank 3] warning - m\n"), std::string::npos);
  configure({.rank = 0, .world_size = 1});
  EXPECT_EQ(written_by([] { warning("m"); }).find("rank"), std::string::npos);
}

TEST_F(LogTest, DropsLowerLevels) {
  EXPECT_EQ(written_by([] { debug("m"); }), "");
  configure({.level = Level::Error});
  EXPECT_EQ(written_by([] { warning("m"); }), "");
  EXPECT_NE(written_by([] { error("m"); }), "");
  configure({.level = Level::Debug});
  EXPECT_NE(written_by([] { debug("m"); }), "");
}

TEST_F(LogTest, InfoRank0LogsOnlyOnRank0) {
  configure({.rank = 1, .world_size = 2});
  EXPECT_EQ(written_by([] { info_rank0("m"), warning_rank0("m"); }), "");
  configure({.rank = 0, .world_size = 2});
  EXPECT_NE(written_by([] { info_rank0("m"); }), "");
  configure({});
  EXPECT_NE(written_by([] { info_rank0("m"); }), "") << "before the rank is known";
}

TEST_F(LogTest, ColorWrapsTheLevelOnly) {
  configure({.color = true});
  EXPECT_NE(written_by([] { info("m"); }).find(" - \033[32minfo\033[0m - m\n"), std::string::npos);
}

TEST_F(LogTest, ThreadsDontMixTheirLines) {
  std::string text = written_by([] {
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i)
      threads.emplace_back([] {
        for (int k = 0; k < 200; ++k) info("0123456789");
      });
    for (auto& thread : threads) thread.join();
  });
  size_t lines = 0;
  for (size_t start = 0, end; (end = text.find('\n', start)) != std::string::npos; start = end + 1, ++lines) {
    std::string line = text.substr(start, end - start);
    EXPECT_EQ(line.substr(line.size() - 20), " - info - 0123456789");
  }
  EXPECT_EQ(lines, 800u);
}

TEST_F(LogTest, IgnoresAFullDisk) {
  int saved = ::dup(STDERR_FILENO);
  int full = ::open("/dev/full", O_WRONLY | O_CLOEXEC);
  ASSERT_GE(full, 0);
  ::dup2(full, STDERR_FILENO);
  EXPECT_NO_THROW(error("m"));
  ::dup2(saved, STDERR_FILENO);
  ::close(saved);
  ::close(full);
}

}  // namespace
}  // namespace titan::log
