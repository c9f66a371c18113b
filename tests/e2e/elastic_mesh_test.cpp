// A pipeline and context parallelism lose ranks: the rest form a group that fits the mesh, and the run stays
// the same as an undisturbed one.

#include <signal.h>

#include <chrono>

#include "e2e/held_steps.h"
#include "e2e/live_run.h"
#include "e2e/resume_run.h"

namespace titan::testing {
namespace {

using Clock = std::chrono::steady_clock;

struct Mesh {
  const char* name;
  Words words;
  bool grows;  // by time, after the loss
};
void PrintTo(const Mesh& mesh, std::ostream* out) { *out << mesh.name; }

class ElasticMesh : public ::testing::TestWithParam<Mesh> {
 protected:
  /// 4 ranks, a replica for every pair: 24 steps, saved after every fifth.
  Words words() const {
    return resumable(config_) + Words{"--nproc",          "4",  "--training.local_batch_size", "2",
                                      "--training.steps", "24", "--lr_scheduler.total_steps",  "24"} +
           GetParam().words;
  }
  Command start(const Words& more) const {
    return start_held(words() + more + Words{"--job.dump_folder", run_.string()}, steps_);
  }
  /// The ranks that wait before `step`, once there are that many; otherwise none.
  std::vector<int> wait_for(const Command& job, int64_t step, size_t num_ranks) const {
    return ranks_once(job, num_ranks, [&](const auto& ranks) { return steps_.are_held(ranks, step); });
  }

  const fs::path config_ = fresh_folder("config"), run_ = fresh_folder("run");
  const HeldSteps steps_{fresh_folder("steps")};
};

TEST_P(ElasticMesh, ContinuesOnTheRemainingRanks) {
  const bool grows = GetParam().grows;
  const auto straight = fresh_folder("straight");
  train_log(straight, words());

  steps_.hold(12);
  steps_.hold(18);
  Command job = start({"--max-restarts", "3", "--min-ranks", "2", "--rejoin-after", grows ? "2" : "never"});
  const std::vector<int> first = wait_for(job, 12, 4);
  ASSERT_EQ(first.size(), 4u);
  const auto lost = Clock::now();
  ::kill(first[2], SIGKILL);
  steps_.let_go(12);  // the others can't make this step without it

  ASSERT_TRUE(are_replaced(job, first, 2));
  // The smaller group makes its steps, however long that takes here, before the launcher can bring the others
  // back.
  if (grows) job.signal(SIGSTOP);
  EXPECT_EQ(wait_for(job, 18, 2).size(), 2u) << "step " << last_logged_step(run_);
  if (grows) {
    job.signal(SIGCONT);
    EXPECT_TRUE(job.wait_for_errors("all ranks are asked to stop after the step in progress"));
    EXPECT_GE(Clock::now() - lost, std::chrono::seconds(2));
  }
  steps_.let_go(18);

  const CommandResult result = job.wait(90);
  ASSERT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.err,
              AllOf(HasSubstr("rank 2 is lost"), HasSubstr("start 2 (restart 1 of 3): 2 of 4 ranks")));
  if (grows) {
    EXPECT_THAT(result.err, HasSubstr("start 3 (restart 1 of 3): 4 of 4 ranks"));
    EXPECT_GE(number_after(result.err, "resuming after step "), 17) << result.err;
  }
  expect_near(curve_of(run_), curve_of(straight));
}

const Mesh kMeshes[] = {
    {.name = "Pipeline", .words = {"--parallelism.pipeline_parallel_degree", "2"}, .grows = true},
    {.name = "Context", .words = {"--parallelism.context_parallel_degree", "2"}, .grows = false}};

INSTANTIATE_TEST_SUITE_P(Meshes, ElasticMesh, ::testing::ValuesIn(kMeshes),
                         [](const auto& tested) { return tested.param.name; });

}  // namespace
}  // namespace titan::testing
