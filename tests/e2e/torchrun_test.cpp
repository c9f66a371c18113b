// Ranks of torchrun's agent, one of which is killed: the agent starts them again, and the run goes on.
// Skipped where .venv has no torchrun.

#include <signal.h>

#include <algorithm>

#include "e2e/live_run.h"
#include "e2e/resume_run.h"

namespace titan::testing {
namespace {

using ::testing::HasSubstr;
namespace fs = std::filesystem;

TEST(Torchrun, AnAgentsKilledRankIsStartedAgain) {
  const std::string torchrun = source_file(".venv/bin/torchrun");
  if (!fs::exists(torchrun)) GTEST_SKIP() << "there is no " << torchrun;
  const fs::path straight = fresh_folder("straight"), run = fresh_folder("run");
  const Words words =
      resumable(fresh_folder("config")) + Words{"--training.steps", "60", "--lr_scheduler.total_steps", "60"};
  train_log(straight, words + ranks(2));

  Command job(Words{torchrun, "--no-python", "--nnodes", "1:4", "--nproc-per-node", "2", "--max-restarts",
                    "3", "--monitor-interval", "0.1", "--rdzv-backend", "c10d", "--rdzv-endpoint",
                    "127.0.0.1:0", "--rdzv-conf", "last_call_timeout=1"} +
                  train_words(words + Words{"--job.dump_folder", run.string()}),
              {{"OMP_NUM_THREADS", "1"}});
  ASSERT_TRUE(wait_until([&] { return last_logged_step(run) >= 12; }, 100));
  const std::vector<int> killed = ranks_of(job);
  ASSERT_EQ(killed.size(), 2u);
  ::kill(killed[1], SIGKILL);
  const CommandResult result = job.wait(150);
  ASSERT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.err, HasSubstr("the run goes on behind step "));
  EXPECT_EQ(curve_of(run), curve_of(straight));
}

}  // namespace
}  // namespace titan::testing
