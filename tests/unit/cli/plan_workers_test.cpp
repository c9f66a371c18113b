#include "cli/plan_workers.h"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cerrno>
#include <filesystem>
#include <optional>

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

std::vector<PlanAnswer> plan_all(PlanWorkers& workers, const std::vector<PlanRequest>& requests) {
  std::vector<PlanAnswer> answers(requests.size());
  size_t next = 0;
  workers.plan([&] { return next < requests.size() ? std::optional(requests[next++]) : std::nullopt; },
               [&](size_t number, const PlanAnswer& answer) { answers.at(number) = answer; });
  return answers;
}

// After each answer, there may be another request.
TEST(PlanWorkers, AskAgainAfterAnAnswer) {
  PlanWorkers workers(2, doubling);
  int num_asked = 0, num_answered = 0;
  workers.plan(
      [&] {
        return num_asked <= num_answered && num_asked < 4 ? std::optional(of(++num_asked)) : std::nullopt;
      },
      [&](size_t number, const PlanAnswer& answer) {
        EXPECT_EQ(answer.step_s, 2.0 * (static_cast<double>(number) + 1));
        ++num_answered;
      });
  EXPECT_EQ(num_answered, 4);
}

TEST(PlanWorkers, AnswerInTheOrderOfTheRequests) {
  PlanWorkers workers(2, doubling);
  const std::vector<PlanAnswer> answers = plan_all(workers, {of(1), of(2), of(3), of(4), of(5)});
  ASSERT_EQ(answers.size(), 5U);
  for (size_t i = 0; i < answers.size(); ++i) EXPECT_EQ(answers[i].step_s, 2.0 * (i + 1));
}

TEST(PlanWorkers, PassAllOfAnAnswer) {
  const PlanAnswer answer{.error = "a \"word\"\n",
                          .has_failed = true,
                          .planning_s = 0.7,
                          .share_rehearsed = 0.4,
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
  EXPECT_EQ(plan_all(workers, {of(1)})[0], answer);
}

TEST(PlanWorkers, PassAllOfARequest) {
  PlanWorkers workers(1, [] {
    return [](const PlanRequest& request) {
      return PlanAnswer{.error = request.settings.at(0).value,
                        .has_failed = request.only_first_rank,
                        .peak_bytes = request.stops_above,
                        .needed_bytes = request.world};
    };
  });
  PlanRequest request = of(3);
  request.only_first_rank = true;
  request.stops_above = 7;
  const PlanAnswer expected{.error = "\"a\"", .has_failed = true, .peak_bytes = 7, .needed_bytes = 3};
  EXPECT_EQ(plan_all(workers, {request})[0], expected);
}

TEST(PlanWorkers, ContinueWithoutOneThatEnds) {
  PlanWorkers workers(2, doubling);
  const std::vector<PlanAnswer> answers = plan_all(workers, {of(13), of(1), of(2), of(3)});
  EXPECT_EQ(answers[0].error, "the process that planned it ended");
  EXPECT_TRUE(answers[0].has_failed);
  for (size_t i = 1; i < answers.size(); ++i) EXPECT_EQ(answers[i].error, "");
}

TEST(PlanWorkers, AnswerWithAnErrorOnceAllHaveEnded) {
  PlanWorkers workers(1, doubling);
  const std::vector<PlanAnswer> answers = plan_all(workers, {of(13), of(1), of(2)});
  EXPECT_EQ(answers[0].error, "the process that planned it ended");
  for (size_t i = 1; i < answers.size(); ++i)
    EXPECT_EQ(answers[i].error, "all processes that plan have ended");
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
