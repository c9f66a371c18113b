#include "cli/sweep/sweep.h"

#include <csignal>

#include "cli/commands.h"
#include "unit/cli/logged_run.h"

namespace titan::cli::sweep {
namespace {

/// Of 100 steps; `enable`: of [checkpoint].
LoggedRun run_of_100(const char* enable) {
  register_builtin_models();
  LoggedRun run("sweep_run_state");
  std::ofstream(run.folder / "config.toml")
      << "[training]\nsteps = 100\n[checkpoint]\nenable = " << enable << "\n[metrics]\nlog_freq = 10\n";
  return run;
}

void leave_model(const LoggedRun& run, const char* step) {
  fs::create_directories(run.folder / "checkpoint" / step);
  std::ofstream(run.folder / "checkpoint" / step / "model.safetensors") << "model";
}

constexpr const char* kFirst = "20261121-234000-000001";
constexpr const char* kSecond = "20261121-235000-000001";
const std::string kStopped = str("step 100 stopped ", SIGTERM);

TEST(SweepRunState, ARunThatCameToItsEndWentThrough) {
  const LoggedRun run = run_of_100("false");
  run.log(0, kFirst, 1, {"step 100 step_end", "step 100 teardown_start", "step 100 teardown_end"});
  EXPECT_TRUE(went_through(run.folder, false));
  EXPECT_TRUE(went_through(run.folder, true)) << "the signal came too late";
}

TEST(SweepRunState, OneThatWasStoppedDidnt) {
  const LoggedRun run = run_of_100("true");
  run.log(0, kFirst, 1, {"step 60 teardown_start", str("step 60 stopped ", SIGTERM), "step 60 teardown_end"});
  leave_model(run, "step-60");
  EXPECT_FALSE(went_through(run.folder, true));
  EXPECT_FALSE(went_through(run.folder, false));
}

// All that is missing is the last validation, which titan train doesn't make up for.
TEST(SweepRunState, OneThatWasStoppedBehindItsLastStepDid) {
  const LoggedRun run = run_of_100("true");
  run.log(0, kFirst, 1, {"step 100 teardown_start", kStopped, "step 100 teardown_end"});
  EXPECT_FALSE(went_through(run.folder, true)) << "nothing is saved";
  leave_model(run, "step-100");
  EXPECT_TRUE(went_through(run.folder, true));
  EXPECT_TRUE(went_through(run.folder, false)) << "given again, titan train has nothing to do";
}

TEST(SweepRunState, StepsInTheFolderOfARunWithoutCheckpointsAreNotIts) {
  const LoggedRun run = run_of_100("false");
  run.log(0, kFirst, 1, {"step 100 teardown_start", kStopped, "step 100 teardown_end"});
  leave_model(run, "step-100");
  EXPECT_FALSE(went_through(run.folder, false));
}

// Exit code 0, and not a word in a log: that of the process before, which was killed, tells nothing.
TEST(SweepRunState, OneThatWasStoppedWhileItStartedDidnt) {
  const LoggedRun run = run_of_100("false");
  run.log(0, kFirst, 1, {"step 60 step_start", "step 60 step_end"});
  EXPECT_FALSE(went_through(run.folder, false));
  run.log(0, kSecond, 1, {});
  EXPECT_FALSE(went_through(run.folder, false));
  fs::remove(run.folder / "config.toml");
  EXPECT_FALSE(went_through(run.folder, false));
}

TEST(SweepRunState, WithoutLogsTheStepsTellUnlessItWasToldToEnd) {
  const LoggedRun run = run_of_100("false");
  std::ofstream(run.folder / "metrics.jsonl") << "{\"step\": 90, \"loss\": 1.0}\n";
  EXPECT_FALSE(went_through(run.folder, false));
  std::ofstream(run.folder / "metrics.jsonl") << "{\"step\": 95, \"loss\": 1.0}\n";
  EXPECT_TRUE(went_through(run.folder, false));
  EXPECT_FALSE(went_through(run.folder, true));
}

}  // namespace
}  // namespace titan::cli::sweep
