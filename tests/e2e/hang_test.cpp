// A rank that hangs is found within its limit and named in one line, and the job ends with every live rank's
// stacks and calls on disk. TITAN_TEST_HANGS: "all" for the long forms, under the nightly label.

#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <functional>
#include <thread>

#include "e2e/held_steps.h"
#include "e2e/live_run.h"
#include "e2e/resume_run.h"

namespace titan::testing {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kHangRanks = 3;
constexpr int kHungExitCode = 124;  // titan/guard/watchdog.h
constexpr double kFoundWithin = 5;  // after the limit
constexpr double kEndsWithin = 10;  // after the verdict

bool in_full() {
  const char* wanted = std::getenv("TITAN_TEST_HANGS");
  return wanted && std::string(wanted) == "all";
}

class Hang : public ::testing::Test {
 protected:
  Words limits(int train_s) const {
    return {"--comm.init_timeout_seconds", "60", "--comm.train_timeout_seconds", std::to_string(train_s)};
  }

  // Steps without end, a few milliseconds each.
  void start(const Words& words, const Command::Variables& variables = {}) {
    Command::Variables all = {{"OMP_NUM_THREADS", "1"}};
    all.insert(variables.begin(), variables.end());
    const int before = read_metrics_rows();
    job_.emplace(train_words(resumable(config_) +
                             Words{"--checkpoint.no_enable", "--training.steps", "1000000",
                                   "--training.seq_len", "16", "--job.dump_folder", run_.string()} +
                             words + ranks(kHangRanks)),
                 all);
    for (int i = 0; i < 3000 && read_metrics_rows() < before + 2; ++i) sleep_s(0.02);
    ASSERT_GE(read_metrics_rows(), before + 2) << "no step within a minute\n" << job_->wait(0).err;
    pids_ = ranks_of(*job_);
    ASSERT_EQ(pids_.size(), size_t{kHangRanks}) << job_->wait(0).err;
  }

  int read_metrics_rows() const {
    std::ifstream file(run_ / "metrics.jsonl");
    int rows = 0;
    for (std::string line; std::getline(file, line);) ++rows;
    return rows;
  }

  // The verdict comes within `limit_s` and a look or two, and the job ends within ten seconds from then.
  void expect_end(Clock::time_point since, double limit_s) {
    expect_end_of([since] { return seconds_since(since); }, limit_s);
  }

  // `hangs_for_s`: how long the rank has hung so far.
  void expect_end_of(const std::function<double()>& hangs_for_s, double limit_s, double start_s = 0) {
    if (pids_.empty())
      ASSERT_TRUE(wait_until([this] { return (pids_ = ranks_of(*job_)).size() == kHangRanks; }))
          << pids_.size();
    const MachineLag lag;
    const bool was_reported = job_->wait_for_errors("the job hangs: rank ", start_s + limit_s + 30);
    const auto reported = Clock::now();
    const double found_s = was_reported ? hangs_for_s() : 0;
    const double found_lag_s = lag.seconds();
    result_ = job_->wait(20);
    const double ended_s = seconds_since(reported);
    ASSERT_TRUE(was_reported) << result_.err;
    EXPECT_LT(found_s, limit_s + kFoundWithin + found_lag_s) << result_.err;
    EXPECT_LT(ended_s, kEndsWithin + lag.seconds() - found_lag_s) << result_.err;
    EXPECT_EQ(result_.status, kHungExitCode) << result_.err;
    EXPECT_TRUE(std::none_of(pids_.begin(), pids_.end(), is_running)) << "a rank outlives its job";
  }

  // For hangs right after a step.
  double seconds_since_last_step() const {
    const auto logged = fs::last_write_time(run_ / "metrics.jsonl");
    return std::chrono::duration<double>(fs::file_time_type::clock::now() - logged).count();
  }

  fs::path record_of(int rank) const {
    return run_ / "comm_traces" / ("rank_" + std::to_string(rank) + ".json");
  }

  // The combined report of the ranks' records.
  std::string report_of_records() const {
    const CommandResult report = run({titan_program(), "debug", "flight", run_.string()});
    EXPECT_EQ(report.status, 0) << report.err;
    return report.out;
  }

  void expect_dumps(const std::vector<int>& live) {
    for (const int rank : live) {
      EXPECT_THAT(text_of(record_of(rank)), HasSubstr("\"reason\": \"rank "))
          << "the verdict on rank " << rank;
      expect_stacks({rank});
    }
  }

  void expect_stacks(const std::vector<int>& live) {
    for (const int rank : live) {
      const std::string text = text_of(run_ / "comm_traces" / ("stacks_" + std::to_string(rank) + ".txt"));
      EXPECT_THAT(text, AllOf(ContainsRegex("^20[0-9-]+T"), HasSubstr("rank " + std::to_string(rank) + " ("),
                              HasSubstr("its last calls:"), HasSubstr("its threads:"),
                              HasSubstr("titan::train::Trainer::"), HasSubstr("(titan-beats)")))
          << rank;
    }
  }

  fs::path config_ = fresh_folder("config"), run_ = fresh_folder("run");
  std::optional<Command> job_;
  std::vector<int> pids_;
  CommandResult result_;
};

// Stopped by the kernel: rank 1 does nothing at all, and can't report that it hangs.
TEST_F(Hang, NamesAStoppedRank) {
  ASSERT_NO_FATAL_FAILURE(start(limits(6)));
  sleep_s(1.5);  // a beat or two after the first step
  const auto stopped = Clock::now();
  ASSERT_EQ(::kill(pids_[1], SIGSTOP), 0);
  expect_end(stopped, 6);
  expect_dumps({0, 2});
  EXPECT_FALSE(fs::exists(record_of(1)));
  EXPECT_THAT(report_of_records(), ContainsRegex("^rank 1 is missing from .*rank"));
  EXPECT_FALSE(fs::exists(run_ / "comm_traces" / "stacks_1.txt"));
  EXPECT_THAT(result_.err,
              ContainsRegex("rank 1 of 3 \\([^,]*, pid " + std::to_string(pids_[1]) +
                            "\\) has given no sign of life for [0-9.]* s \\(limit 6 s, "
                            "comm.train_timeout_seconds\\), last seen in ([a-z_]* of )?step [0-9]*; "
                            "its process is stopped by a signal"));
  EXPECT_THAT(result_.err, AllOf(HasSubstr("rank 0 waits in "), HasSubstr("rank 2 waits in ")));
}

// Rank 0 serves the store through which the others communicate.
TEST_F(Hang, NamesAStoppedRankZero) {
  ASSERT_NO_FATAL_FAILURE(start(limits(5) + Words{"--log-rank", "all"}));
  const auto stopped = Clock::now();
  ASSERT_EQ(::kill(pids_[0], SIGSTOP), 0);
  expect_end(stopped, 5);
  expect_dumps({1, 2});
  EXPECT_THAT(result_.err, HasSubstr("rank 0 of 3"));
  EXPECT_THAT(result_.err, HasSubstr("has given no sign of life"));
}

// The first step after a resume ends the long limit of the start, though it isn't the run's first.
TEST_F(Hang, ResumedRunUsesTheTrainTimeout) {
  train(run_, part_of_run(resumable(config_) + Words{"--training.seq_len", "16"}, 3) + ranks(kHangRanks));
  ASSERT_NO_FATAL_FAILURE(
      start(limits(5) + Words{"--checkpoint.enable", "--checkpoint.interval", "1000000"}));
  sleep_s(1.5);
  const auto stopped = Clock::now();
  ASSERT_EQ(::kill(pids_[1], SIGSTOP), 0);
  expect_end(stopped, 5);
  EXPECT_EQ(whole_rows(run_).at(3).at("step"), 4) << "it didn't resume after step 3";
  EXPECT_THAT(result_.err, ContainsRegex("rank 1 of 3 \\([^)]*\\) has given no sign of life for [0-9.]* s "
                                         "\\(limit 5 s, comm.train_timeout_seconds\\)"));
}

// The others wait for it, in a call whose own limit is longer than the one for data.
TEST_F(Hang, NamesARankThatWaitsForData) {
  const std::string stall = "2 20 " + (run_ / "stalls").string();
  job_.emplace(
      train_words(small_run(config_) +
                  Words{"--validation.no_enable", "--experimental.custom_import",
                        std::string(TITAN_BINARY_DIR) + "/lib/libstalling_source.so", "--training.dataset",
                        "stalling", "--training.dataset_path", stall, "--training.steps", "1000000",
                        "--job.dump_folder", run_.string(), "--comm.data_timeout_seconds", "2"} +
                  limits(30) + ranks(kHangRanks)),
      Command::Variables{{"OMP_NUM_THREADS", "1"}});
  expect_end_of([&] { return seconds_since_last_step(); }, 2, /*start_s=*/60);
  EXPECT_THAT(result_.err,
              ContainsRegex("rank 2 of 3 \\([^)]*\\) hangs in data of step [0-9]*, without progress for "
                            "[0-9.]* s \\(limit 2 s, comm.data_timeout_seconds\\)"));
  EXPECT_THAT(result_.err, HasSubstr("rank 2 of 3 failed first: exit code 124"));
  expect_dumps({0, 1, 2});
}

/// A rank stops before its second call of this kind in a step; `stack` is what its stack shows then.
struct Operator {
  const char* name;
  const char* op;
  const char* frame;
};
void PrintTo(const Operator& op, std::ostream* out) { *out << op.name; }

/// A rank that stops in the middle of a step while its process, and its watchdog, stay alive: it reports
/// itself where it hangs.
class HangingStep : public Hang, public ::testing::WithParamInterface<Operator> {
 protected:
  static constexpr int kStep = 4;

  void start_and_hang(const std::string& op) {
    const HeldSteps steps(fresh_folder("steps"));
    steps.hold(kStep);
    const Words words = limits(5) + HeldSteps::words() +
                        Words{"--checkpoint.enable", "--checkpoint.interval", "1000000", "--log-rank", "all"};
    Command::Variables variables = steps.variables();
    variables.merge(Command::Variables{
        {"TITAN_TEST_HELD_RANK", "1"}, {"TITAN_TEST_HELD_OP", op}, {"TITAN_TEST_HELD_NORM", "2"}});
    ASSERT_NO_FATAL_FAILURE(start(words, variables));
    ASSERT_TRUE(wait_until([&] { return steps.is_held(pids_[1], kStep); }));
  }
};

TEST_P(HangingStep, IsReportedWithItsPhaseAndStack) {
  ASSERT_NO_FATAL_FAILURE(start_and_hang(GetParam().op));
  expect_end(Clock::now(), 5);
  // The rank that hangs or one of its peers may be overdue first, depending on when they look.
  const std::string who = "rank 1 of 3 \\([^)]*, pid " + std::to_string(pids_[1]) + "\\) ";
  const std::string where = "forward_backward of step " + std::to_string(kStep) + ", ";
  const std::string limit = "\\(limit 5 s, comm.train_timeout_seconds\\)";
  EXPECT_THAT(result_.err,
              AnyOf(ContainsRegex(who + "hangs in " + where + "without progress for [0-9.]* s " + limit),
                    ContainsRegex(who + "hasn't joined the call that the others wait in: it is in " + where +
                                  "for [0-9.]* s without progress.*" + limit)));
  EXPECT_THAT(result_.err, ContainsRegex("rank 1 \\([^)]*\\) is in compute, " + where));
  EXPECT_THAT(result_.err, ContainsRegex("rank 2 \\([^)]*\\) is in compute, [a-z_]+ of step " +
                                         std::to_string(kStep) + ", waiting in [a-z_]+ #[0-9]+ of group"));
  for (int rank = 0; rank < kHangRanks; ++rank)
    EXPECT_THAT(result_.err, HasSubstr("the job hangs: rank " + std::to_string(rank) + " ("));
  EXPECT_GE(count_of(result_.err, "its threads:"), kHangRanks) << "each rank prints its stack";
  expect_dumps({0, 1, 2});
  EXPECT_THAT(text_of(run_ / "comm_traces" / "stacks_1.txt"),
              AllOf(HasSubstr("libheld_step.so"), HasSubstr(GetParam().frame)));
  EXPECT_THAT(result_.err, HasSubstr(GetParam().frame));
}

INSTANTIATE_TEST_SUITE_P(Compute, HangingStep,
                         ::testing::Values(Operator{"Forward", "titan::rms_norm",
                                                    "titan::ops::add_rms_norm("},
                                           Operator{"Backward", "titan::rms_norm_backward",
                                                    "titan::train::WholeModelRunner::forward_backward("}),
                         [](const auto& info) { return info.param.name; });

// Its file system hangs and takes no record either; here it is a pipe that nobody reads. The stacks are
// printed, and the job ends normally.
TEST_F(Hang, NamesARankWhoseSaveHangs) {
  fs::create_directories(run_ / "comm_traces");
  ASSERT_EQ(::mkfifo((run_ / "comm_traces" / ".rank_1.json.tmp").c_str(), 0600), 0);
  job_.emplace(
      train_words(resumable(config_) +
                  Words{"--experimental.custom_import",
                        std::string(TITAN_BINARY_DIR) + "/lib/libhanging_save.so",
                        "--comm.checkpoint_timeout_seconds", "2", "--job.dump_folder", run_.string()} +
                  limits(30) + ranks(kHangRanks)),
      Command::Variables{{"OMP_NUM_THREADS", "1"}, {"TITAN_TEST_HANGING_RANK", "1"}});
  expect_end_of([&] { return seconds_since_last_step(); }, 2, /*start_s=*/60);
  EXPECT_THAT(result_.err, ContainsRegex("rank 1 of 3 \\([^)]*\\) hangs in save of step [0-9]*, without "
                                         "progress for [0-9.]* s \\(limit 2 s, "
                                         "comm.checkpoint_timeout_seconds\\)"));
  expect_stacks({1});
  EXPECT_FALSE(fs::exists(record_of(1)));
  EXPECT_THAT(result_.err, HasSubstr("the files of this hang can't be written"));
}

void stop_for_a_while(const std::vector<int>& pids, double seconds) {
  for (const int pid : pids) ASSERT_EQ(::kill(pid, SIGSTOP), 0);
  sleep_s(seconds);
  for (const int pid : pids) ASSERT_EQ(::kill(pid, SIGCONT), 0);
  sleep_s(0.5);
}

// One rank lags within the limit; then all are stopped for longer than it, as by a debugger or the machine's
// owner.
TEST_F(Hang, ToleratesSlowRanksAndPausedJobs) {
  ASSERT_NO_FATAL_FAILURE(start(limits(6)));
  for (int i = 0; i < (in_full() ? 20 : 2); ++i) stop_for_a_while({pids_[i % 3]}, 1);
  stop_for_a_while(pids_, 7.5);
  const int rows = read_metrics_rows();
  for (int i = 0; i < 500 && read_metrics_rows() == rows; ++i) sleep_s(0.02);
  EXPECT_GT(read_metrics_rows(), rows) << "the run continues";
  job_->signal(SIGINT);
  result_ = job_->wait(20);
  EXPECT_THAT(result_.err, Not(HasSubstr("hangs")));
}

// Each rank, repeatedly.
TEST_F(Hang, NightlyNamesEachRankInTurn) {
  if (!in_full()) GTEST_SKIP() << "a long form: TITAN_TEST_HANGS=all";
  for (int i = 0; i < 12 && !HasFailure(); ++i) {
    fs::remove_all(run_);
    ASSERT_NO_FATAL_FAILURE(start(limits(5) + Words{"--log-rank", "all"}));
    sleep_s(0.05 * i);
    const auto stopped = Clock::now();
    ASSERT_EQ(::kill(pids_[i % 3], SIGSTOP), 0);
    expect_end(stopped, 5);
    EXPECT_THAT(result_.err, HasSubstr("rank " + std::to_string(i % 3) + " of 3 ("));
    for (int rank = 0; rank < kHangRanks; ++rank)
      if (rank != i % 3) expect_dumps({rank});
  }
}

}  // namespace
}  // namespace titan::testing
