// torchrun's agents restart the remaining ranks after ranks are killed, or after agents are lost with their
// ranks and return, and the run continues. Skipped if .venv has no torchrun.

#include <signal.h>

#include <algorithm>
#include <list>

#include "e2e/live_run.h"
#include "e2e/resume_run.h"

namespace titan::testing {
namespace {

std::string torchrun_program() { return source_file(".venv/bin/torchrun"); }

Words run_of(int steps) {
  return resumable(fresh_folder("config")) + Words{"--training.steps", std::to_string(steps),
                                                   "--lr_scheduler.total_steps", std::to_string(steps)};
}

TEST(Torchrun, RestartsAKilledRank) {
  if (!fs::exists(torchrun_program())) GTEST_SKIP() << "there is no " << torchrun_program();
  const fs::path straight = fresh_folder("straight"), run = fresh_folder("run");
  const Words words = run_of(60);
  train_log(straight, words + ranks(2));

  Command job(Words{torchrun_program(), "--no-python", "--nnodes", "1:4", "--nproc-per-node", "2",
                    "--max-restarts", "3", "--monitor-interval", "0.1", "--rdzv-backend", "c10d",
                    "--rdzv-endpoint", "127.0.0.1:0", "--rdzv-conf", "last_call_timeout=1"} +
                  train_words(words + Words{"--job.dump_folder", run.string()}),
              {{"OMP_NUM_THREADS", "1"}});
  ASSERT_TRUE(wait_until([&] { return last_logged_step(run) >= 12; }, 100));
  const std::vector<int> killed = ranks_of(job);
  ASSERT_EQ(killed.size(), 2u);
  ::kill(killed[1], SIGKILL);
  const CommandResult result = job.wait(150);
  ASSERT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.err, HasSubstr("resuming after step "));
  EXPECT_EQ(curve_of(run), curve_of(straight));
}

/// A host's agent with one rank; the first agent serves the agents' store. Agents of torch 2.11 that share
/// their store with the ranks wait for each other until they time out when another joins (docs/elastic.md).
class Agent {
 public:
  Agent(const std::string& port, bool is_first, const Words& program)
      : command_(Words{torchrun_program(), "--no-python", "--nnodes", "1:4", "--nproc-per-node", "1",
                       "--max-restarts", "20", "--monitor-interval", "0.1", "--rdzv-id", "elastic",
                       "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:" + port, "--rdzv-conf",
                       std::string("last_call_timeout=3,keep_alive_interval=1,is_host=") +
                           (is_first ? "1" : "0")} +
                     program,
                 {{"OMP_NUM_THREADS", "1"}, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"}}) {}

  /// Ranks that train, or are about to: the agent has no other live children.
  std::vector<int> ranks() const {
    std::vector<int> found;
    for (const int child : ranks_of(command_))
      if (is_running(child)) found.push_back(child);
    return found;
  }
  /// Imitates the loss of a host: the agent can't notify the others.
  void lose() {
    const std::vector<int> lost = ranks();
    command_.signal(SIGKILL);
    for (const int rank : lost) ::kill(rank, SIGKILL);
  }
  /// Imitates a host that leaves: the agent stops its ranks and ends.
  void leave() {
    command_.signal(SIGTERM);
    EXPECT_NE(command_.wait(60).status, 0);
  }
  CommandResult wait(double limit_s) { return command_.wait(limit_s); }

 private:
  Command command_;
};

std::vector<int> ranks_of_agents(const std::list<Agent>& agents) {
  std::vector<int> all;
  for (const Agent& agent : agents)
    for (const int rank : agent.ranks()) all.push_back(rank);
  return all;
}

/// Waits until each agent has a rank, none of `before` among them, and they have trained up to `step`.
::testing::AssertionResult train_together(const std::list<Agent>& agents, const std::vector<int>& before,
                                          const fs::path& run, int64_t step) {
  std::vector<int> now;
  const auto is_old = [&](int rank) { return std::find(before.begin(), before.end(), rank) != before.end(); };
  const bool come = wait_until(
      [&] {
        now = ranks_of_agents(agents);
        return now.size() == agents.size() && std::none_of(now.begin(), now.end(), is_old) &&
               last_logged_step(run) >= step;
      },
      150);
  if (come) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << now.size() << " ranks of " << agents.size() << " agents at step "
                                       << last_logged_step(run) << ", not at " << step;
}

// Four hosts with a rank each: one is lost, one is asked to leave, and two others join later. At each start
// the agents agree again on who is there.
TEST(Torchrun, LosingAndAddingAgentsDoesNotChangeTheRun) {
  if (!fs::exists(torchrun_program())) GTEST_SKIP() << "there is no " << torchrun_program();
  constexpr int kSteps = 2000;
  const fs::path straight = fresh_folder("straight"), run = fresh_folder("run");
  Words words = run_of(kSteps) + Words{"--checkpoint.interval", "20", "--checkpoint.keep_latest_k", "3"};
  // Rounding grows over many steps: in double precision it stays below the tolerance.
  for (const char* key : {"dtype", "mixed_precision_param", "mixed_precision_reduce"})
    words = words + Words{std::string("--training.") + key, "float64"};
  train_log(straight, words + ranks(4));

  const Words program = train_words(words + Words{"--job.dump_folder", run.string()});
  const std::string port = some_port();
  std::list<Agent> agents;
  for (int i = 0; i < 4; ++i) agents.emplace_back(port, i == 0, program);
  ASSERT_TRUE(train_together(agents, {}, run, 30));
  for (const bool leaves : {false, true}) {
    const auto before = ranks_of_agents(agents);
    const int64_t step = last_logged_step(run);
    leaves ? agents.back().leave() : agents.back().lose();
    agents.pop_back();
    ASSERT_TRUE(train_together(agents, before, run, step + 30));
  }
  const auto before = ranks_of_agents(agents);
  const int64_t step = last_logged_step(run);
  for (int i = 0; i < 2; ++i) agents.emplace_back(port, false, program);
  ASSERT_TRUE(train_together(agents, before, run, step + 30));
  EXPECT_LT(last_logged_step(run), kSteps) << "the run ended before the others joined";

  std::string log;
  for (Agent& agent : agents) {
    const CommandResult result = agent.wait(150);
    EXPECT_EQ(result.status, 0) << result.err;
    log += result.err;
  }
  EXPECT_THAT(log, HasSubstr("exit code 143, so that the other agents restart their ranks"));
  const Curve expected = curve_of(straight);
  ASSERT_EQ(expected.size(), static_cast<size_t>(kSteps));
  expect_near(curve_of(run), expected);
}

}  // namespace
}  // namespace titan::testing
