// titan train's own plan: how a run starts the program that plans, and what it does with the answer.

#include "cli/plan_watch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fcntl.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <optional>
#include <sstream>
#include <thread>

#include <nlohmann/json.hpp>

#include "core/file.h"
#include "unit/cli/logged_run.h"

namespace titan::cli {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr const char* kPlan =
    R"({"device": "GPU", "world": 8, "step_s": 0.5, "tokens_per_s_per_device": 1000, "mfu": 0.4,
"memory": {"by_role": [{"role": "first rank", "rank": 0, "peak_reserved_bytes": 2147483648, "peak_allocated_bytes": 1073741824,
"shard_gradient_bytes": 134217728, "at_peak": {"categories": {"parameters": 268435456, "gradients": 184549376, "optimizer": 536870912, "activations": 83886080}},
"after_step": {"parameters": 268435456, "gradients": 184549376, "optimizer": 536870912, "buffers": 9}}]},
"time_by_role": [{"compute": 0.3, "optimizer": 0.05, "exposed_communication": 0.1, "bubble": 0, "host": 0.05}]})";

TEST(ReadPlan, FindsTheFiguresOfRankZero) {
  const RunPlan plan = read_plan(kPlan);
  EXPECT_EQ(plan.device, "GPU");
  EXPECT_EQ(plan.world_size, 8);
  EXPECT_EQ(plan.step_s, 0.5);
  EXPECT_EQ(plan.tps, 1000);
  EXPECT_EQ(plan.mfu, 40);
  EXPECT_EQ(plan.reserved_gib, 2);
  EXPECT_EQ(plan.allocated_gib, 1);
  EXPECT_EQ(plan.lasting.parameters, 0.25);
  EXPECT_EQ(plan.lasting.gradients, 0.125) << "without buffers of reductions";
  EXPECT_EQ(plan.rest, (std::vector<std::pair<std::string, double>>{
                           {"activations", 0.078125}, {"gradients on their way to shards", 0.046875}}));
  EXPECT_EQ(plan.lasting.optimizer, 0.5);
  EXPECT_DOUBLE_EQ(
      plan.compute_s + plan.optimizer_s + plan.exposed_communication_s + plan.bubble_s + plan.host_s, 0.5);
}

TEST(ReadPlan, RefusesOtherTexts) {
  for (const char* text : {"", "{}", "[1]", "no JSON", R"({"device": "GPU", "world": 8})"})
    EXPECT_THROW(read_plan(text), Error) << text;
}

// With unbalanced context parallelism, times are those of the rank with most to do, which comes first.
TEST(ReadPlan, TakesRankZerosMemoryAndKnowsWhoseTimesItHas) {
  nlohmann::json plan = nlohmann::json::parse(kPlan);
  EXPECT_TRUE(read_plan(plan.dump()).has_parts_of_rank_0);
  nlohmann::json& roles = plan.at("memory").at("by_role");
  nlohmann::json busiest = roles[0];
  busiest.update({{"role", "last context rank"}, {"rank", 7}, {"peak_reserved_bytes", int64_t{3} << 30}});
  roles.insert(roles.begin(), busiest);
  plan.at("time_by_role")[0]["role"] = "last context rank";
  const RunPlan read = read_plan(plan.dump());
  EXPECT_FALSE(read.has_parts_of_rank_0);
  EXPECT_EQ(read.reserved_gib, 2);
  EXPECT_EQ(read.peaks[0].rank, 0);
}

TEST(ReadPlan, FindsThePeakOfEachRole) {
  nlohmann::json plan = nlohmann::json::parse(kPlan);
  nlohmann::json last = plan.at("memory").at("by_role")[0];
  last.update({{"role", "last rank"}, {"rank", 7}, {"peak_reserved_bytes", 1 << 30}});
  plan.at("memory").at("by_role").push_back(last);
  const RunPlan read = read_plan(plan.dump());
  ASSERT_EQ(read.peaks.size(), 2U);
  EXPECT_EQ(read.peaks[0].reserved_gib, 2);
  EXPECT_EQ(read.peaks[1].role, "last rank");
  EXPECT_EQ(read.peaks[1].rank, 7);
  EXPECT_EQ(read.peaks[1].reserved_gib, 1);
}

// Two pipeline ranks of three ranks each, and the last rank, which has less.
const std::vector<PlannedPeak> kPipeline = {
    {"pipeline rank 0", 0, 10}, {"pipeline rank 1", 3, 20}, {"last rank", 5, 18}};

TEST(UnplannedPeak, IsTheOneThatDiffersMost) {
  EXPECT_FALSE(find_unplanned_peak(kPipeline, {10, 10, 10, 20, 20, 18}));
  const auto peak = find_unplanned_peak(kPipeline, {10.4, 11, 10, 23, 20, 20});
  ASSERT_TRUE(peak);
  EXPECT_EQ(peak->rank, 3);
  EXPECT_EQ(peak->planned.role, "pipeline rank 1");
  EXPECT_EQ(peak->gib, 23);
  EXPECT_NEAR(peak->difference, 0.15, 1e-12);
  EXPECT_EQ(peak->num_others, 2) << "ranks 1 and 5";
}

TEST(UnplannedPeak, MayBeTooSmallOnlyForARankThatWasPlanned) {
  EXPECT_FALSE(find_unplanned_peak(kPipeline, {10, 5, 5, 20, 5, 18}));
  const auto peak = find_unplanned_peak(kPipeline, {10, 5, 5, 20, 5, 9});
  ASSERT_TRUE(peak);
  EXPECT_EQ(peak->rank, 5);
  EXPECT_EQ(peak->difference, -0.5);
  EXPECT_TRUE(find_unplanned_peak({{"every rank", 0, 10}}, {10, 5, 10})) << "all are alike";
}

/// A run of which each logged step has this memory. Rank 1 has `gib_of_rank_1`, if memory is compared.
class WatchedRun {
 public:
  explicit WatchedRun(const std::string& script, std::optional<double> gib_of_rank_1 = 2)
      : folder_("plan_watch"),
        watch_({.command = {"sh", "-c", script},
                .file = file(),
                .gather_peaks = gib_of_rank_1 ? [=](double mine) { return std::vector{mine, *gib_of_rank_1}; }
                                              : std::function<std::vector<double>(double)>(),
                .measure_lasting =
                    [] { return LastingMemory{.parameters = 4, .gradients = 2, .optimizer = 8}; }},
               window_) {
    std::ofstream(folder_.folder / "answer") << kPlan;
    window_.start();
    watch_.begin_after(0);
  }
  fs::path folder() const { return folder_.folder; }
  fs::path file() const { return folder() / kPlanFile; }
  /// Until the watch knows it: the steps after that are rated.
  void wait_for_plan() {
    for (int i = 0; i < 3000 && !log(1, 0).percent_of_plan; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    ASSERT_TRUE(log(1, 0).percent_of_plan);
  }
  train::StepMetrics log(int64_t step, double memory_gib) {
    window_.count_step(100);
    train::StepMetrics metrics;
    window_.close(metrics);
    metrics.step = step;
    metrics.memory_gib = memory_gib;
    watch_.logged(metrics);
    return metrics;
  }
  void rewind() { watch_.begin_after(1); }

 private:
  LoggedRun folder_;
  train::MetricsWindow window_{at::kCPU, {}};
  PlanWatch watch_;
};

std::string answer() {
  return str("cat ", (fs::path(::testing::TempDir()) / "plan_watch" / "answer").string());
}

TEST(PlanWatch, WritesThePlanAndRatesTheStepsAfterIt) {
  WatchedRun run("sleep 0.2; " + answer());
  EXPECT_FALSE(run.log(1, 2).percent_of_plan) << "the run doesn't wait";
  run.wait_for_plan();
  EXPECT_EQ(read_file(run.file()), kPlan);
  const train::StepMetrics metrics = run.log(3, 2);
  ASSERT_TRUE(metrics.percent_of_plan);
  EXPECT_NEAR(*metrics.percent_of_plan, 100 * metrics.tps / 1000, 1e-9);
}

/// Standard error, in a file while this lives.
class ErrorLog {
 public:
  ErrorLog() : path_(fs::path(::testing::TempDir()) / "plan_watch.log"), before_(::dup(STDERR_FILENO)) {
    const int file = ::open(path_.c_str(), O_CREAT | O_TRUNC | O_WRONLY | O_APPEND | O_CLOEXEC, 0600);
    ::dup2(file, STDERR_FILENO);
    ::close(file);
  }
  ~ErrorLog() {
    ::dup2(before_, STDERR_FILENO);
    ::close(before_);
  }
  ErrorLog(const ErrorLog&) = delete;
  ErrorLog& operator=(const ErrorLog&) = delete;

  std::string text() const { return read_file(path_); }
  /// Returns what was logged until then.
  std::string wait_for(const std::string& part) const {
    for (int i = 0; i < 3000 && text().find(part) == std::string::npos; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    return text();
  }

 private:
  fs::path path_;
  int before_;
};

TEST(PlanWatch, WarnsOnceWhenMemoryIsFivePercentOff) {
  const ErrorLog log;
  WatchedRun run(answer());
  run.wait_for_plan();
  run.log(2, 2.5);
  EXPECT_THAT(log.text(), Not(HasSubstr("of the plan"))) << "memory still grows in the first steps";
  for (const int64_t step : {3, 4, 5}) run.log(step, 1.5);  // the peak stays
  const std::string text = log.text();
  EXPECT_THAT(text, HasSubstr("step 3: the allocator of rank 0 has taken up to 2.50 GiB from the device, "
                              "25.0 % more than the 2.00 GiB "
                              "of the plan (first rank);"));
  EXPECT_EQ(text.find("of the plan"), text.rfind("of the plan"));
}

TEST(PlanWatch, NamesTheRankWhoseMemoryIsOff) {
  const ErrorLog log;
  WatchedRun run(answer(), /*gib_of_rank_1=*/3);
  run.wait_for_plan();
  run.log(3, 2.2);
  EXPECT_THAT(
      log.text(),
      AllOf(HasSubstr("the allocator of rank 1 has taken up to 3.00 GiB from the device, 50.0 % more"),
            HasSubstr("; 1 other rank is more than 5 % off, too")));
}

// The plan may come later on one rank than on another, so they can't wait for it.
TEST(PlanWatch, GathersPeaksInTheSameStepWithAndWithoutAPlan) {
  const ErrorLog log;
  WatchedRun run("sleep 0.5; " + answer());
  run.log(3, 2.5);
  run.log(4, 4);
  run.wait_for_plan();
  run.log(5, 0);
  EXPECT_THAT(log.text(), HasSubstr("step 3: the allocator of rank 0 has taken up to 2.50 GiB"));
}

TEST(PlanWatch, IsSilentAboutMemoryThatIsAsPlannedOrAnotherKindOfIt) {
  const ErrorLog log;
  {
    WatchedRun run(answer());
    run.wait_for_plan();
    for (const int64_t step : {3, 4}) run.log(step, 2.09);
  }
  {
    WatchedRun run(answer(), /*gib_of_rank_1=*/std::nullopt);
    run.wait_for_plan();
    run.log(3, 30);
  }
  EXPECT_THAT(log.text(), Not(HasSubstr("of the plan")));
}

TEST(PlanWatch, WritesWhatStaysInMemoryOnce) {
  WatchedRun run(answer(), /*gib_of_rank_1=*/std::nullopt);
  run.wait_for_plan();
  EXPECT_FALSE(read_memory_file(run.folder())) << "before the optimizer has its state";
  run.log(3, 0);
  const auto memory = read_memory_file(run.folder());
  ASSERT_TRUE(memory);
  EXPECT_EQ(memory->parameters, 4);
  EXPECT_EQ(memory->gradients, 2);
  EXPECT_EQ(memory->optimizer, 8);
  fs::remove(run.folder() / kMemoryFile);
  run.log(4, 0);
  EXPECT_FALSE(read_memory_file(run.folder()));
}

std::string log_of_failure(const std::string& script) {
  const ErrorLog log;
  WatchedRun run(script);
  const std::string text = log.wait_for("this run has no plan");
  EXPECT_FALSE(run.log(3, 9).percent_of_plan);
  EXPECT_FALSE(fs::exists(run.file()));
  return text;
}

TEST(PlanWatch, SaysWhyThereIsNoPlan) {
  EXPECT_THAT(log_of_failure("echo a warning >&2; echo 'titan: this GPU is unknown' >&2; exit 2"),
              HasSubstr("this run has no plan: this GPU is unknown\n"));
  EXPECT_THAT(log_of_failure("exit 3"), HasSubstr("this run has no plan: titan plan ended with exit code 3"));
  EXPECT_THAT(log_of_failure("kill -SEGV $$"),
              HasSubstr("this run has no plan: titan plan was ended by signal 11"));
  EXPECT_THAT(log_of_failure("echo nonsense"), HasSubstr("this run has no plan: this isn't what titan plan"));
}

TEST(PlanWatch, EndsWithoutWaitingForThePlan) {
  const ErrorLog log;
  const auto start = std::chrono::steady_clock::now();
  { const WatchedRun run("exec sleep 60"); }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
  EXPECT_THAT(log.text(), HasSubstr("this run has no plan: it ended before titan plan did"));
}

TEST(PlanWatch, RemovesThePlanOfAnEarlierStartAlsoWithoutANewOne) {
  const LoggedRun run("plan_watch");
  std::ofstream(run.folder / kPlanFile) << kPlan;
  train::MetricsWindow window(at::kCPU, {});
  PlanWatch watch({.command = {}, .file = run.folder / kPlanFile}, window);
  watch.begin_after(0);
  EXPECT_FALSE(fs::exists(run.folder / kPlanFile));
}

TEST(PlanWatch, PlansOnceThoughTheRunIsRewound) {
  WatchedRun run("echo >> " + (fs::path(::testing::TempDir()) / "plan_watch" / "starts").string() + "; " +
                 answer());
  run.wait_for_plan();
  run.rewind();
  EXPECT_TRUE(fs::exists(run.file()));
  EXPECT_EQ(read_file(run.file().parent_path() / "starts"), "\n");
}

// A lower priority, and no file of the run's, whose peers would wait for its end.
TEST(PlanWatch, StartsAProgramThatDoesNotDisturbTheRun) {
  const fs::path seen = fs::path(::testing::TempDir()) / "plan_watch" / "seen";
  WatchedRun run(
      str("nice > ", seen.string(), "; set -- /proc/$$/fd/*; echo $# >> ", seen.string(), "; ", answer()));
  run.wait_for_plan();
  std::istringstream text(read_file(seen));
  int priority = 0, files = 0;
  text >> priority >> files;
  EXPECT_GE(priority, 10);
  EXPECT_LE(files, 4);  // one is the folder that is listed
}

}  // namespace
}  // namespace titan::cli
