// A torchrun agent that stops its ranks while they start. The test plays the agent: the ranks are its
// children and run under an agent's variables. torchrun_test.cpp uses a real agent.

#include <signal.h>

#include <vector>

#include "e2e/live_run.h"
#include "e2e/resume_run.h"

namespace titan::testing {
namespace {

constexpr int kAgentRanks = 2;

// Only one rank receives the agent's signal, and the other learns from it that an agent sent it: both exit
// codes must show the other agents that the job continues.
TEST(AgentStopRun, StoppingOneRankDuringTheStartEndsAllAsKilled) {
  const fs::path states = fresh_folder("states"), run = fresh_folder("run");
  std::ofstream(states / "hold_building") << "\n";
  const Words words = resumable(fresh_folder("config")) +
                      Words{"--job.dump_folder", run.string(), "--experimental.custom_import",
                            std::string(TITAN_BINARY_DIR) + "/lib/libwaiting_state.so"};
  std::vector<Command> ranks;
  for (int rank = 0; rank < kAgentRanks; ++rank)
    ranks.emplace_back(train_words(words),
                       Command::Variables{{"OMP_NUM_THREADS", "1"},
                                          {"RANK", std::to_string(rank)},
                                          {"LOCAL_RANK", std::to_string(rank)},
                                          {"WORLD_SIZE", std::to_string(kAgentRanks)},
                                          {"LOCAL_WORLD_SIZE", std::to_string(kAgentRanks)},
                                          {"MASTER_ADDR", "127.0.0.1"},
                                          {"MASTER_PORT", some_port()},
                                          {"TORCHELASTIC_RUN_ID", "agent_stop"},
                                          {"TORCHELASTIC_RESTART_COUNT", "0"},
                                          {"TORCHELASTIC_MAX_RESTARTS", "3"},
                                          {"TITAN_TEST_SAVES", states.string()}});
  ASSERT_TRUE(
      wait_until([&] { return fs::exists(states / "building.0") && fs::exists(states / "building.1"); }));
  ranks[1].signal(SIGTERM);
  for (Command& rank : ranks) {
    const CommandResult result = rank.wait(30);
    EXPECT_EQ(result.status, 128 + SIGTERM) << result.err;
    EXPECT_THAT(result.err, HasSubstr("stops the run before it began: nothing was trained"));
    EXPECT_THAT(result.err, HasSubstr("an agent of torchrun sent SIGTERM to its ranks"));
  }
  EXPECT_EQ(last_logged_step(run), 0);
}

}  // namespace
}  // namespace titan::testing
