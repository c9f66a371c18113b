// A rank that hangs: found within its limit, named in one line, and the job ends, with every live rank's
// stacks and calls on disk. TITAN_TEST_HANGS: "all" for the long forms, under the nightly label.

#include <gmock/gmock.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <functional>
#include <thread>

#include "e2e/resume_run.h"

namespace titan::testing {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;
using Clock = std::chrono::steady_clock;
namespace fs = std::filesystem;

constexpr int kRanks = 3;
constexpr int kHungExitCode = 124;  // dist/watchdog.h

bool in_full() {
  const char* wanted = std::getenv("TITAN_TEST_HANGS");
  return wanted && std::string(wanted) == "all";
}

std::vector<int> ranks_of(int pid) {
  std::vector<int> children;
  std::ifstream file("/proc/" + std::to_string(pid) + "/task/" + std::to_string(pid) + "/children");
  for (int child; file >> child;) children.push_back(child);
  return children;
}

std::string text_of(const fs::path& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

void sleep_s(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

class Hang : public ::testing::Test {
 protected:
  Words limits(int train_s) const {
    return {"--comm.init_timeout_seconds", "60", "--comm.train_timeout_seconds", std::to_string(train_s)};
  }

  // Steps without end, of a few milliseconds.
  void start(const Words& words, const Command::Variables& variables = {}) {
    Command::Variables all = {{"OMP_NUM_THREADS", "1"}};
    all.insert(variables.begin(), variables.end());
    const int before = read_metrics_rows();
    job_.emplace(train_words(resumable(config_) +
                             Words{"--checkpoint.no_enable", "--training.steps", "1000000",
                                   "--training.seq_len", "16", "--job.dump_folder", run_.string()} +
                             words + ranks(kRanks)),
                 all);
    for (int i = 0; i < 3000 && read_metrics_rows() < before + 2; ++i) sleep_s(0.02);
    ASSERT_GE(read_metrics_rows(), before + 2) << "no step within a minute\n" << job_->wait(0).err;
    pids_ = ranks_of(job_->pid());
    ASSERT_EQ(pids_.size(), size_t{kRanks}) << job_->wait(0).err;
  }

  int read_metrics_rows() const {
    std::ifstream file(run_ / "metrics.jsonl");
    int rows = 0;
    for (std::string line; std::getline(file, line);) ++rows;
    return rows;
  }

  // The verdict is found within `limit_s` and a look or two, and ten seconds later the job is over.
  void expect_end(Clock::time_point since, double limit_s) {
    result_ = job_->wait(limit_s + 20);
    EXPECT_LT(seconds_since(since), limit_s + 5 + 10) << result_.err;
    EXPECT_EQ(result_.status, kHungExitCode) << result_.err;
  }

  fs::path record_of(int rank) const {
    return run_ / "comm_traces" / ("rank_" + std::to_string(rank) + ".json");
  }

  // What the ranks' records say together.
  std::string told_by_records() const {
    const CommandResult told = run({titan_program(), "debug", "flight", run_.string()});
    EXPECT_EQ(told.status, 0) << told.err;
    return told.out;
  }

  void expect_dumps(const std::vector<int>& live) {
    for (const int rank : live) {
      EXPECT_THAT(text_of(record_of(rank)), HasSubstr("\"reason\": \"rank "))
          << "the verdict, of rank " << rank;
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

// As the kernel has it: rank 1 does nothing at all, not even tell that it hangs.
TEST_F(Hang, AStoppedRankIsNamedByTheOthers) {
  ASSERT_NO_FATAL_FAILURE(start(limits(6)));
  sleep_s(1.5);  // a beat or two behind the first step
  const auto stopped = Clock::now();
  ASSERT_EQ(::kill(pids_[1], SIGSTOP), 0);
  expect_end(stopped, 6);
  expect_dumps({0, 2});
  EXPECT_FALSE(fs::exists(record_of(1)));
  EXPECT_THAT(told_by_records(), ContainsRegex("^rank 1 is missing from .*rank"));
  EXPECT_FALSE(fs::exists(run_ / "comm_traces" / "stacks_1.txt"));
  EXPECT_THAT(result_.err,
              ContainsRegex("rank 1 of 3 \\([^,]*, pid " + std::to_string(pids_[1]) +
                            "\\) has given no sign of life for [0-9.]* s \\(limit 6 s, "
                            "comm.train_timeout_seconds\\), last seen in ([a-z_]* of )?step [0-9]*; "
                            "its process is stopped by a signal"));
  EXPECT_THAT(result_.err, AllOf(HasSubstr("rank 0 waits in "), HasSubstr("rank 2 waits in ")));
}

// Which keeps the store that the others speak through.
TEST_F(Hang, AStoppedRankZeroIsNamedToo) {
  ASSERT_NO_FATAL_FAILURE(start(limits(5) + Words{"--log-rank", "all"}));
  const auto stopped = Clock::now();
  ASSERT_EQ(::kill(pids_[0], SIGSTOP), 0);
  expect_end(stopped, 5);
  expect_dumps({1, 2});
  EXPECT_THAT(result_.err, HasSubstr("rank 0 of 3"));
  EXPECT_THAT(result_.err, HasSubstr("has given no sign of life"));
}

// Its first step ends the long limit of a start, though it isn't the run's.
TEST_F(Hang, ARunThatGoesOnHasTheLimitOfTraining) {
  train(run_, part_of_run(resumable(config_) + Words{"--training.seq_len", "16"}, 3) + ranks(kRanks));
  ASSERT_NO_FATAL_FAILURE(
      start(limits(5) + Words{"--checkpoint.enable", "--checkpoint.interval", "1000000"}));
  sleep_s(1.5);
  const auto stopped = Clock::now();
  ASSERT_EQ(::kill(pids_[1], SIGSTOP), 0);
  expect_end(stopped, 5);
  EXPECT_EQ(whole_rows(run_).at(3).at("step"), 4) << "it didn't go on from step 3";
  EXPECT_THAT(result_.err, ContainsRegex("rank 1 of 3 \\([^)]*\\) has given no sign of life for [0-9.]* s "
                                         "\\(limit 5 s, comm.train_timeout_seconds\\)"));
}

// The others wait for it, in a call whose own limit is longer than the one for data.
TEST_F(Hang, ARankThatWaitsForDataIsNamed) {
  const auto began = Clock::now();
  const std::string stall = "2 60 " + (run_ / "stalls").string();
  Command job(
      train_words(small_run(config_) +
                  Words{"--validation.no_enable", "--experimental.custom_import",
                        std::string(TITAN_BINARY_DIR) + "/lib/libstalling_source.so", "--training.dataset",
                        "stalling", "--training.dataset_path", stall, "--training.steps", "1000000",
                        "--job.dump_folder", run_.string(), "--comm.data_timeout_seconds", "2"} +
                  limits(30) + ranks(kRanks)),
      {{"OMP_NUM_THREADS", "1"}});
  result_ = job.wait(60);
  EXPECT_LT(seconds_since(began), 55);
  EXPECT_EQ(result_.status, kHungExitCode) << result_.err;
  EXPECT_THAT(result_.err,
              ContainsRegex("rank 2 of 3 \\([^)]*\\) hangs in data of step [0-9]*, without progress for "
                            "[0-9.]* s \\(limit 2 s, comm.data_timeout_seconds\\)"));
  EXPECT_THAT(result_.err, HasSubstr("rank 2 of 3 failed first: exit code 124"));
  expect_dumps({0, 1, 2});
}

// As where the file system that it writes to hangs, which takes no record either: here a pipe that nobody
// reads. The stacks are printed, and the job ends as it should.
TEST_F(Hang, ASaveThatHangsIsNamed) {
  const auto began = Clock::now();
  fs::create_directories(run_ / "comm_traces");
  ASSERT_EQ(::mkfifo((run_ / "comm_traces" / ".rank_1.json.tmp").c_str(), 0600), 0);
  Command job(
      train_words(resumable(config_) +
                  Words{"--experimental.custom_import",
                        std::string(TITAN_BINARY_DIR) + "/lib/libhanging_save.so",
                        "--comm.checkpoint_timeout_seconds", "2", "--job.dump_folder", run_.string()} +
                  limits(30) + ranks(kRanks)),
      {{"OMP_NUM_THREADS", "1"}, {"TITAN_TEST_HANGING_RANK", "1"}});
  result_ = job.wait(60);
  EXPECT_LT(seconds_since(began), 55);
  EXPECT_EQ(result_.status, kHungExitCode) << result_.err;
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

// One rank that lags behind within the limit, then all of them stopped for longer than it, as by a debugger
// or the machine's owner.
TEST_F(Hang, SlowRanksAndStoppedJobsAreLeftAlone) {
  ASSERT_NO_FATAL_FAILURE(start(limits(6)));
  for (int i = 0; i < (in_full() ? 20 : 2); ++i) stop_for_a_while({pids_[i % 3]}, 1);
  stop_for_a_while(pids_, 7.5);
  const int rows = read_metrics_rows();
  for (int i = 0; i < 500 && read_metrics_rows() == rows; ++i) sleep_s(0.02);
  EXPECT_GT(read_metrics_rows(), rows) << "it goes on";
  job_->signal(SIGINT);
  result_ = job_->wait(20);
  EXPECT_THAT(result_.err, Not(HasSubstr("hangs")));
}

// Any rank, again and again.
TEST_F(Hang, NightlyEveryRankInTurn) {
  if (!in_full()) GTEST_SKIP() << "a long form: TITAN_TEST_HANGS=all";
  for (int i = 0; i < 12 && !HasFailure(); ++i) {
    fs::remove_all(run_);
    ASSERT_NO_FATAL_FAILURE(start(limits(5)));
    sleep_s(0.05 * i);
    const auto stopped = Clock::now();
    ASSERT_EQ(::kill(pids_[i % 3], SIGSTOP), 0);
    expect_end(stopped, 5);
    EXPECT_THAT(result_.err, HasSubstr("rank " + std::to_string(i % 3) + " of 3 ("));
    for (int rank = 0; rank < kRanks; ++rank)
      if (rank != i % 3) expect_dumps({rank});
  }
}

}  // namespace
}  // namespace titan::testing
