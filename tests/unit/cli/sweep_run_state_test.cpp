#include "cli/sweep.h"

#include <csignal>

#include <ATen/ops/ones.h>

#include "cli/commands.h"
#include "titan/checkpoint/safetensors.h"
#include "unit/cli/logged_run.h"

namespace titan::cli::sweep {
namespace {

/// A run of 100 steps. `enable`: the value of checkpoint.enable.
LoggedRun run_of_100(const char* enable) {
  register_builtin_models();
  LoggedRun run("sweep_run_state");
  std::ofstream(run.folder / "config.toml")
      << "[training]\nsteps = 100\n[checkpoint]\nenable = " << enable << "\n[metrics]\nlog_freq = 10\n";
  return run;
}

void leave_model(const LoggedRun& run, const char* step) {
  fs::create_directories(run.folder / "checkpoint" / step);
  save_safetensors(run.folder / "checkpoint" / step / "model.safetensors", {{"weight", at::ones({3})}});
}

constexpr const char* kFirst = "20261121-234000-000001";
constexpr const char* kSecond = "20261121-235000-000001";
const std::string kStopped = str("step 100 stopped ", SIGTERM);

TEST(SweepRunState, IsFinishedAfterTheRunsEnd) {
  const LoggedRun run = run_of_100("false");
  run.log(0, kFirst, 1, {"step 100 step_end", "step 100 teardown_start", "step 100 teardown_end"});
  EXPECT_TRUE(is_finished(run.folder, false));
  EXPECT_TRUE(is_finished(run.folder, true)) << "the signal came too late";
}

TEST(SweepRunState, IsNotFinishedAfterAStop) {
  const LoggedRun run = run_of_100("true");
  run.log(0, kFirst, 1, {"step 60 teardown_start", str("step 60 stopped ", SIGTERM), "step 60 teardown_end"});
  leave_model(run, "step-60");
  EXPECT_FALSE(is_finished(run.folder, true));
  EXPECT_FALSE(is_finished(run.folder, false));
}

// Only the last validation is missing, and titan train doesn't repeat that.
TEST(SweepRunState, IsFinishedWhenStoppedAfterTheLastStep) {
  const LoggedRun run = run_of_100("true");
  run.log(0, kFirst, 1, {"step 100 teardown_start", kStopped, "step 100 teardown_end"});
  EXPECT_FALSE(is_finished(run.folder, true)) << "the step isn't saved";
  leave_model(run, "step-100");
  EXPECT_TRUE(is_finished(run.folder, true));
  EXPECT_TRUE(is_finished(run.folder, false)) << "titan train would have nothing left to do";
}

TEST(SweepRunState, IgnoresStepsInTheFolderOfARunWithoutCheckpoints) {
  const LoggedRun run = run_of_100("false");
  run.log(0, kFirst, 1, {"step 100 teardown_start", kStopped, "step 100 teardown_end"});
  leave_model(run, "step-100");
  EXPECT_FALSE(is_finished(run.folder, false));
}

// The process exited with 0 before it logged anything. The previous process was killed, so its log doesn't
// show an end.
TEST(SweepRunState, IsNotFinishedWhenStoppedDuringTheStart) {
  const LoggedRun run = run_of_100("false");
  run.log(0, kFirst, 1, {"step 60 step_start", "step 60 step_end"});
  EXPECT_FALSE(is_finished(run.folder, false));
  run.log(0, kSecond, 1, {});
  EXPECT_FALSE(is_finished(run.folder, false));
  fs::remove(run.folder / "config.toml");
  EXPECT_FALSE(is_finished(run.folder, false));
}

TEST(SweepRunState, DependsOnTheStepsWithoutLogs) {
  const LoggedRun run = run_of_100("false");
  std::ofstream(run.folder / "metrics.jsonl") << "{\"step\": 90, \"loss\": 1.0}\n";
  EXPECT_FALSE(is_finished(run.folder, false));
  std::ofstream(run.folder / "metrics.jsonl") << "{\"step\": 95, \"loss\": 1.0}\n";
  EXPECT_TRUE(is_finished(run.folder, false));
  EXPECT_FALSE(is_finished(run.folder, true));
}

}  // namespace
}  // namespace titan::cli::sweep
