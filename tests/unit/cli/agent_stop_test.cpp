#include "cli/train.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

namespace titan::cli {
namespace {

TEST(AgentStop, ExitsWithTheSignalOnlyIfAnAgentRestartsRanks) {
  const dist::Launch agent{.by = "torchrun", .max_restarts = 3};
  EXPECT_EQ(code_after_stop(agent, {.signal = SIGTERM, .rank = 1, .by_launcher = true}), 128 + SIGTERM);
  EXPECT_EQ(code_after_stop(agent, {.signal = SIGTERM, .rank = 1}), 0) << "someone else sent the signal";
  EXPECT_EQ(code_after_stop(agent, {}), 0) << "no signal came";
  const train::StopCause stop{.signal = SIGTERM, .rank = 0, .by_launcher = true};
  EXPECT_EQ(code_after_stop({.by = "torchrun"}, stop), 0) << "the agent does not restart ranks";
  EXPECT_EQ(code_after_stop({.by = "titan", .max_restarts = 3}, stop), 0);
}

TEST(AgentStop, FindsTheLauncherThatPassesSignalsOn) {
  EXPECT_EQ(signaling_launcher({.by = "torchrun"}), getppid());
  EXPECT_EQ(signaling_launcher({.by = "titan"}), getppid());
  for (const char* other : {"slurm", "openmpi", "env", "none"})
    EXPECT_EQ(signaling_launcher({.by = other}), 0) << other;
}

}  // namespace
}  // namespace titan::cli
