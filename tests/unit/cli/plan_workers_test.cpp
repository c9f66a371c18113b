#include "cli/plan_workers.h"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cerrno>
#include <filesystem>

#include <gtest/gtest.h>

#include "titan/core/error.h"

namespace titan::cli {
namespace {

using train::PlanAnswer;
using train::PlanRequest;

// A job of 13 ranks ends the process.
PlanWorkers::Answer doubling() {
  return [](const PlanRequest& request) {
    if (request.world == 13) ::_exit(1);
    return PlanAnswer{.error = {}, .step_s = 2.0 * request.world};
  };
}

PlanRequest of(int world) { return {.settings = {{"model", "name", "\"a\""}}, .world = world}; }

size_t num_open_files() {
  const std::filesystem::directory_iterator files("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(files), end(files)));
}

bool has_children() { return ::waitpid(-1, nullptr, WNOHANG) >= 0 || errno != ECHILD; }

TEST(PlanWorkers, AnswerInTheOrderOfTheRequests) {
  PlanWorkers workers(2, doubling);
  const std::vector<PlanAnswer> answers = workers.plan({of(1), of(2), of(3), of(4), of(5)});
  ASSERT_EQ(answers.size(), 5U);
  for (size_t i = 0; i < answers.size(); ++i) EXPECT_EQ(answers[i].step_s, 2.0 * (i + 1));
}

TEST(PlanWorkers, PassAllOfAnAnswer) {
  const PlanAnswer answer{.error = "a \"word\"\n",
                          .has_failed = true,
                          .planning_s = 0.7,
                          .step_s = 0.1,
                          .tokens = 2,
                          .mfu = 0.3,
                          .parameters = 4,
                          .peak_bytes = 5,
                          .needed_bytes = 12,
                          .most_bytes = {6, 7, 8},
                          .saved_bytes = 11,
                          .seconds = {9, 10}};
  PlanWorkers workers(1, [&] { return [&](const PlanRequest&) { return answer; }; });
  EXPECT_EQ(workers.plan({of(1)})[0], answer);
}

TEST(PlanWorkers, ContinueWithoutOneThatEnds) {
  PlanWorkers workers(2, doubling);
  const std::vector<PlanAnswer> answers = workers.plan({of(13), of(1), of(2), of(3)});
  EXPECT_EQ(answers[0].error, "the process that planned it ended");
  EXPECT_TRUE(answers[0].has_failed);
  for (size_t i = 1; i < answers.size(); ++i) EXPECT_EQ(answers[i].error, "");
}

TEST(PlanWorkers, AllEndIfOneCannotStart) {
  const size_t before = num_open_files();
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  const int free = ::dup(STDIN_FILENO);
  ::close(free);
  // One takes four files, and keeps two.
  const rlimit low{.rlim_cur = static_cast<rlim_t>(free) + 5, .rlim_max = limit.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &low), 0);
  EXPECT_THROW(PlanWorkers(2, doubling), Error);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
  EXPECT_EQ(num_open_files(), before);
  EXPECT_FALSE(has_children());
}

}  // namespace
}  // namespace titan::cli
