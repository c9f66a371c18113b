// SIGKILL at any time, of one rank or of all: the newest complete step loads, and the run continues as if
// undisturbed. TITAN_TEST_KILLS sets the number in each mode; 3 by default, 100 under the nightly label.

#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <optional>
#include <random>
#include <thread>

#include "e2e/live_run.h"
#include "e2e/resume_run.h"

namespace titan::testing {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kSteps = 60;

int num_kills() {
  const char* kills = std::getenv("TITAN_TEST_KILLS");
  return kills ? std::atoi(kills) : 3;
}

// Looks only at names, like code that searches for a checkpoint.
std::optional<int> newest_listed(const fs::path& run) {
  std::optional<int> newest;
  if (!fs::exists(run / "checkpoint")) return newest;
  for (const std::string& name : names_in(run / "checkpoint"))
    if (name.starts_with("step-")) newest = std::max(newest.value_or(0), std::stoi(name.substr(5)));
  return newest;
}

void expect_only_complete_steps(const fs::path& run) {
  for (const std::string& name : names_in(run / "checkpoint")) {
    if (!name.starts_with("step-")) continue;
    const auto files = names_in(run / "checkpoint" / name);
    EXPECT_EQ(files,
              (std::vector<std::string>{"manifest.json", "rank_00000.safetensors", "rank_00001.safetensors"}))
        << name;
  }
}

void expect_part_of(const Curve& expected, const Curve& found) {
  int64_t next = 1;
  for (const auto& [step, numbers] : found) {
    EXPECT_EQ(step, next++);
    EXPECT_EQ(numbers, expected.at(step)) << "step " << step;
  }
}

// The inode of a file that a run rewrites when it has loaded the step that it resumes from.
std::optional<ino_t> record_of(const fs::path& run) {
  struct stat status {};
  return ::stat((run / "config.toml").c_str(), &status) == 0 ? std::optional(status.st_ino) : std::nullopt;
}

void wait_for_training(const fs::path& run, std::optional<ino_t> before) {
  for (int i = 0; i < 6000 && record_of(run) == before; ++i) sleep_s(0.005);
}

class Killed : public ::testing::TestWithParam<const char*> {
 protected:
  void measure(const Words& words, const fs::path& run) {
    auto start = Clock::now();
    Command job(train_words(words + Words{"--job.dump_folder", run.string()}), {{"OMP_NUM_THREADS", "1"}});
    wait_for_training(run, std::nullopt);
    startup_s_ = seconds_since(start);
    start = Clock::now();
    const CommandResult result = job.wait(100);
    ASSERT_EQ(result.status, 0) << result.err;
    step_s_ = seconds_since(start) / kSteps;
  }

  // Only one mode validates; in the other, a kill is more likely to hit a save.
  static bool validates() { return std::string(GetParam()) == "disabled"; }

  // The logged validation steps and losses.
  static std::vector<std::pair<int64_t, double>> validated(const fs::path& run) {
    std::vector<std::pair<int64_t, double>> rows;
    for (const auto& row : read_lines(run / "validation.jsonl"))
      rows.emplace_back(row.at("step").get<int64_t>(), row.at("loss").get<double>());
    return rows;
  }

  double random_up_to(double seconds) { return std::uniform_real_distribution<>(0, seconds)(random_); }

  // Waits for a random remaining step in the log (a fixed time would reach other steps on a busy machine),
  // and then up to three steps longer, so that the kill may also hit the run's end.
  void wait_for_any_step(const Command& job, std::optional<int> newest) {
    const int first = newest.value_or(0) + 1;
    const int step = std::uniform_int_distribution<>(std::min(first, kSteps), kSteps)(random_);
    wait_until([&] { return last_logged_step(folder_) >= step || children_of(job.pid()).empty(); });
    sleep_s(random_up_to(3 * step_s_));
  }

  // Kills the run sometimes while it starts, otherwise while it trains or ends.
  void run_and_kill(const Words& words) {
    const std::optional<int> newest = newest_listed(folder_);
    const std::optional<ino_t> record = record_of(folder_);
    Command job(train_words(words), {{"OMP_NUM_THREADS", "1"}});
    const bool at_start = newest && random_() % 5 == 0;
    if (at_start) {
      sleep_s(random_up_to(startup_s_));
    } else {
      wait_for_training(folder_, record);
      wait_for_any_step(job, newest);
    }
    const std::vector<int> ranks = children_of(job.pid());
    if (!ranks.empty() && random_() % 2 == 0) {
      ::kill(ranks[random_() % ranks.size()], SIGKILL);
    } else {
      job.signal(SIGKILL);
      for (const int rank : ranks) ::kill(rank, SIGKILL);
    }
    const CommandResult result = job.wait(60);
    if (result.err.find("resuming after step") != std::string::npos)
      EXPECT_THAT(result.err, HasSubstr("resuming after step " + std::to_string(newest.value_or(-1)) + ","));
  }

  fs::path folder_ = fresh_folder("run");
  std::mt19937 random_ = random_generator();
  double startup_s_ = 0, step_s_ = 0;
};

TEST_P(Killed, AtAnyTimeARunResumesUnchanged) {
  const Words words = resumable(fresh_folder("config")) +
                      Words{"--nproc",
                            "2",
                            "--training.steps",
                            std::to_string(kSteps),
                            "--checkpoint.interval",
                            "2",
                            "--checkpoint.no_last_save_model_only",
                            "--checkpoint.keep_latest_k",
                            "3",
                            "--checkpoint.async_mode",
                            GetParam()} +
                      (validates() ? Words{"--validation.enable", "--validation.freq", "4"} : Words{});
  const auto straight = fresh_folder("straight");
  measure(words, straight);
  const Curve expected = curve_of(straight);
  ASSERT_EQ(expected.size(), static_cast<size_t>(kSteps));

  const Words again = words + Words{"--job.dump_folder", folder_.string()};
  int resumed = 0;
  // A run that was killed before its first save, or that ended first, isn't resumed.
  const int enough = (num_kills() + 3) / 4;
  for (int kill = 0; kill < num_kills() || resumed < enough; ++kill) {
    ASSERT_LT(kill, num_kills() + 10) << "only " << resumed << " runs could be resumed";
    resumed += newest_listed(folder_).has_value();
    run_and_kill(again);
    if (fs::exists(folder_ / "checkpoint")) expect_only_complete_steps(folder_);
    expect_part_of(expected, curve_of(folder_));
    if (HasFailure()) return;
    if (newest_listed(folder_).value_or(0) >= kSteps) fs::remove_all(folder_);
  }
  train_log(folder_, words);
  EXPECT_EQ(curve_of(folder_), expected);
  const std::vector<std::string> last = {".lock", "step-56", "step-58", "step-60"};
  EXPECT_EQ(names_in(folder_ / "checkpoint"), last);
  if (validates()) EXPECT_EQ(validated(folder_), validated(straight));
}

INSTANTIATE_TEST_SUITE_P(Resume, Killed, ::testing::Values("disabled", "async_with_pinned_mem"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace titan::testing
