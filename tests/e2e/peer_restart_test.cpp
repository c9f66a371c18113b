// A run that keeps its state in memory and loses ranks resumes from memory, without a state on disk, and
// equals an undisturbed run.

#include <signal.h>

#include <algorithm>

#include "e2e/held_steps.h"
#include "e2e/live_run.h"
#include "e2e/resume_run.h"

namespace titan::testing {
namespace {

class PeerRestart : public ::testing::Test {
 protected:
  /// 40 steps; on disk only the model after the last, unless `more` says otherwise.
  Words words(const Words& more = {}) const {
    return resumable(config_) + Words{"--nproc",
                                      num_ranks_,
                                      "--training.steps",
                                      "40",
                                      "--lr_scheduler.total_steps",
                                      "40",
                                      "--checkpoint.interval",
                                      "1000"} +
           more;
  }
  Words with_peers(const std::string& interval, const Words& more = {},
                   const std::string& max_restarts = "9") const {
    return words({"--checkpoint.peer_interval", interval, "--checkpoint.peer_folder", memory_.string(),
                  "--job.dump_folder", run_.string(), "--max-restarts", max_restarts}) +
           more;
  }

  Command start(const Words& train) const { return start_held(train, steps_); }

  /// The complete generations. Leaves out one that disappears meanwhile.
  std::vector<fs::path> generations() const {
    std::vector<fs::path> found;
    for (const fs::path& folder : entries_of(memory_))
      for (const fs::path& entry : entries_of(folder))
        if (entry.filename().string().starts_with("step-")) found.push_back(entry);
    return found;
  }
  static int64_t step_of(const fs::path& generation) {
    return std::stoll(generation.filename().string().substr(5));
  }
  /// -1: there is none.
  int64_t newest_kept() const {
    int64_t newest = -1;
    for (const fs::path& path : generations()) newest = std::max(newest, step_of(path));
    return newest;
  }

  /// Returns the job's ranks, which wait before `step`, once the state after step `kept` is in memory; by
  /// default any state, because some are skipped when steps are fast.
  std::vector<int> wait_for(const Command& job, int64_t step, size_t num_ranks = 3, int64_t kept = -1) const {
    const std::vector<int> ranks = ranks_once(job, num_ranks, [&](const auto& waiting) {
      return steps_.are_held(waiting, step) && (kept < 0 ? newest_kept() > 0 : newest_kept() == kept);
    });
    EXPECT_FALSE(ranks.empty()) << ranks_of(job).size() << " ranks, step " << last_logged_step(run_);
    return ranks;
  }
  /// Kills one of the job's ranks before `step`. Returns when new ranks have started; they aren't held there.
  void kill_rank(const Command& job, size_t rank, int64_t step, size_t num_ranks = 3,
                 int64_t kept = -1) const {
    const std::vector<int> ranks = wait_for(job, step, num_ranks, kept);
    ASSERT_FALSE(ranks.empty());
    ::kill(ranks.at(rank), SIGKILL);
    steps_.let_go(step);  // the others notice the loss within the step
    ASSERT_TRUE(are_replaced(job, ranks));
  }

  /// Damages a complete state; its files keep their sizes.
  static void damage(const fs::path& state) {
    int num_damaged = 0;
    for (const auto& file : fs::directory_iterator(state)) {
      if (file.path().extension() != ".safetensors") continue;
      std::fstream stream(file.path(), std::ios::in | std::ios::out | std::ios::binary);
      stream.seekp(-4, std::ios::end);
      stream.write("\x55\x55\x55\x55", 4);
      ++num_damaged;
    }
    EXPECT_GT(num_damaged, 0) << state;
  }

  void expect_same_curve(const Words& undisturbed, double tolerance) const {
    const auto straight = fresh_folder("straight");
    train_log(straight, undisturbed);
    const Curve expected = curve_of(straight), found = curve_of(run_);
    ASSERT_EQ(found.size(), expected.size());
    for (const auto& [step, numbers] : expected)
      for (size_t i = 0; i < numbers.size(); ++i)
        EXPECT_NEAR(found.at(step)[i], numbers[i], i < 2 ? tolerance : 0)
            << "number " << i << " of step " << step;
  }

  const fs::path config_ = fresh_folder("config"), run_ = fresh_folder("run"),
                 memory_ = fresh_folder("memory");
  const HeldSteps steps_{fresh_folder("steps")};
  std::string num_ranks_ = "3";

 private:
  static std::vector<fs::path> entries_of(const fs::path& folder) {
    std::vector<fs::path> entries;
    std::error_code gone;
    for (fs::directory_iterator entry(folder, gone); !gone && entry != fs::directory_iterator();
         entry.increment(gone))
      entries.push_back(entry->path());
    return entries;
  }
};

TEST_F(PeerRestart, ResumesFromMemoryWithoutReadingTheDisk) {
  steps_.hold(11);
  steps_.hold(23);
  Command job = start(with_peers("1"));
  kill_rank(job, 1, 11);
  kill_rank(job, 0, 23);
  const CommandResult result = job.wait(100);
  ASSERT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.err,
              AllOf(HasSubstr("restart 2 of 9"), HasSubstr("is in memory; the newest on disk is none"),
                    HasSubstr("loaded from " + memory_.string()), HasSubstr("on one host")));
  EXPECT_THAT(result.err, Not(HasSubstr("loaded from " + run_.string())));
  EXPECT_TRUE(fs::is_empty(memory_)) << "the job's folder wasn't removed";
  expect_same_curve(words(), 0);
}

// A lost rank costs the steps since the last multiple of five. The disk has an older state too, but its files
// aren't read, so their damage isn't reported.
TEST_F(PeerRestart, RepeatsOnlyTheStepsSinceTheLastState) {
  steps_.hold(6);
  steps_.hold(13);
  steps_.hold(18);
  Command job = start(with_peers("5", {"--checkpoint.interval", "7"}));
  // While one state is being saved, the next would be skipped.
  ASSERT_FALSE(wait_for(job, 6, 3, /*kept=*/5).empty());
  steps_.let_go(6);
  for (const int64_t kept : {10, 15}) {
    const int64_t held = kept + 3, on_disk = kept / 7 * 7;
    const std::vector<int> ranks = wait_for(job, held, 3, kept);
    ASSERT_FALSE(ranks.empty());
    ASSERT_TRUE(wait_until([&] { return fs::exists(step_folder(run_, static_cast<int>(on_disk))); }));
    damage(step_folder(run_, static_cast<int>(on_disk)));
    ::kill(ranks.at(kept % 2), SIGKILL);
    steps_.let_go(held);  // the others notice the loss within the step
  }
  const CommandResult result = job.wait(100);
  ASSERT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.err, AllOf(HasSubstr("restart 2 of 9"),
                                HasSubstr("step 10 is in memory; the newest on disk is step 7"),
                                HasSubstr("resuming after step 10, loaded from " + memory_.string()),
                                HasSubstr("step 15 is in memory; the newest on disk is step 14"),
                                HasSubstr("resuming after step 15, loaded from " + memory_.string())));
  EXPECT_THAT(result.err, Not(AnyOf(HasSubstr("loaded from " + run_.string()), HasSubstr("skipped: "))));
  expect_same_curve(words(), 0);
}

TEST_F(PeerRestart, FewerRanksResumeFromTheSameMemory) {
  const Words elastic = {"--min-ranks", "2", "--rejoin-after", "never"};
  steps_.hold(11);
  Command job = start(with_peers("1", elastic));
  kill_rank(job, 2, 11);
  const CommandResult result = job.wait(100);
  ASSERT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.err, AllOf(HasSubstr("2 of 3 ranks"), HasSubstr("loaded from " + memory_.string())));
  expect_same_curve(words(), 1e-5);
}

// Rank 0 has the first and the last stage, and so both copies of the tied weight.
TEST_F(PeerRestart, ResumesTheTiedStagesOfAVSchedule) {
  num_ranks_ = "2";
  const Words tied = {"--training.local_batch_size",
                      "4",
                      "--parallelism.pipeline_parallel_degree",
                      "2",
                      "--parallelism.pipeline_parallel_schedule",
                      "ZBVZeroBubble",
                      "--model.args.tie_embeddings"};
  steps_.hold(11);
  Command job = start(with_peers("1", tied));
  kill_rank(job, 0, 11, 2);
  const CommandResult result = job.wait(100);
  ASSERT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.err, HasSubstr("loaded from " + memory_.string()));
  expect_same_curve(words(tied), 0);
}

TEST_F(PeerRestart, FallsBackToTheDiskIfMemoryIsDamaged) {
  const Words on_disk = {"--checkpoint.interval",      "41", "--training.steps", "80",
                         "--lr_scheduler.total_steps", "80"};
  steps_.hold(44);
  Command job = start(with_peers("42", on_disk));
  ASSERT_FALSE(wait_for(job, 44, 3, /*kept=*/42).empty());
  const auto kept = generations();  // the one before may still be there
  const auto newest =
      std::find_if(kept.begin(), kept.end(), [](const auto& path) { return step_of(path) == 42; });
  ASSERT_NE(newest, kept.end());
  damage(*newest);
  kill_rank(job, 1, 44, 3, /*kept=*/42);
  const CommandResult result = job.wait(100);
  ASSERT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.err, AllOf(HasSubstr("skipped: step 42 in memory"), HasSubstr("checksum"),
                                HasSubstr("resuming after step 41, loaded from " + run_.string())));
  expect_same_curve(words(on_disk), 0);
}

// The launcher is killed, so nothing is cleaned up; the next launcher starts another job in the same folder.
TEST_F(PeerRestart, AnotherJobStartsFromScratch) {
  {
    steps_.hold(6);
    Command job = start(with_peers("1"));
    const std::vector<int> ranks = wait_for(job, 6);
    ASSERT_FALSE(ranks.empty());
    job.signal(SIGKILL);
    job.wait(20);
    ASSERT_TRUE(wait_until([&] { return std::none_of(ranks.begin(), ranks.end(), is_running); }));
  }
  ASSERT_FALSE(fs::is_empty(memory_));
  const CommandResult result = try_train(with_peers("1"), 100);
  ASSERT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.err, AllOf(HasSubstr("which an earlier job of this run left"),
                                HasSubstr("there is no saved state"), Not(HasSubstr("loaded from"))));
  EXPECT_TRUE(fs::is_empty(memory_));
  expect_same_curve(words(), 0);
}

// A copy has the original's mark but is another run, so the original's state stays in memory.
TEST_F(PeerRestart, ACopiedRunLeavesTheOriginalsMemoryAlone) {
  steps_.hold(8);
  Command job = start(with_peers("1"));
  ASSERT_FALSE(wait_for(job, 8).empty());
  const fs::path copy = fresh_folder("copy");
  ASSERT_EQ(run({"cp", "-a", (run_ / ".").string(), copy.string()}).status, 0);
  const CommandResult copied = try_train(with_peers("1", {"--job.dump_folder", copy.string()}), 100);
  ASSERT_EQ(copied.status, 0) << copied.err;
  EXPECT_THAT(copied.err, AllOf(HasSubstr("there is no saved state"), Not(HasSubstr("loaded from")),
                                Not(HasSubstr("which an earlier job"))));
  EXPECT_FALSE(generations().empty());
  kill_rank(job, 1, 8);
  const CommandResult result = job.wait(100);
  ASSERT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.err, HasSubstr("loaded from " + memory_.string()));
  expect_same_curve(words(), 0);
}

// The state that the ranks would have resumed from is saved to disk.
TEST_F(PeerRestart, LeavesNothingInMemoryAfterGivingUp) {
  steps_.hold(4);
  steps_.hold(8);
  Command job = start(with_peers("1", {}, "1"));
  kill_rank(job, 1, 4);
  const std::vector<int> ranks = wait_for(job, 8);
  ASSERT_FALSE(ranks.empty());
  ::kill(ranks.front(), SIGKILL);
  const CommandResult result = job.wait(60);
  EXPECT_EQ(result.status, 128 + SIGKILL);
  EXPECT_TRUE(fs::is_empty(memory_));
  const int64_t step = number_after(result.err, "the state after step ");
  EXPECT_GE(step, 1);
  EXPECT_TRUE(fs::exists(step_folder(run_, static_cast<int>(step)))) << result.err;
}

// The job is stopped while no rank is running: no rank can save, and the disk has no state.
TEST_F(PeerRestart, LosesNoStepWhenStoppedBetweenTwoStarts) {
  const Words elastic = {"--min-ranks", "1", "--rejoin-after", "never"};
  steps_.hold(11);
  Command job = start(with_peers("1", elastic));
  ASSERT_FALSE(wait_for(job, 11).empty());
  ASSERT_TRUE(kill_all_ranks(job));
  usleep(300'000);
  const int64_t kept = newest_kept();
  ASSERT_GT(kept, 0);
  job.signal(SIGTERM);
  const CommandResult stopped = job.wait(60);
  EXPECT_EQ(stopped.status, 128 + SIGTERM) << stopped.err;
  const int64_t step = number_after(stopped.err, "the state after step ");
  EXPECT_EQ(step, kept) << stopped.err;
  EXPECT_THAT(stopped.err, AllOf(HasSubstr("too few ranks are left"), HasSubstr("is saved: ")));
  EXPECT_TRUE(fs::is_empty(memory_));

  const CommandResult result = try_train(with_peers("1"), 100);
  ASSERT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.err,
              HasSubstr("resuming after step " + std::to_string(step) + ", loaded from " + run_.string()));
  expect_same_curve(words(), 0);
}

// The run's storage is gone.
TEST_F(PeerRestart, KeepsTheStateInMemoryIfSavingFails) {
  const Words elastic = {"--min-ranks", "1", "--rejoin-after", "never"};
  steps_.hold(4);
  Command job = start(with_peers("1", elastic));
  ASSERT_FALSE(wait_for(job, 4).empty());
  ASSERT_TRUE(kill_all_ranks(job));
  fs::rename(run_ / "checkpoint", run_ / "away");
  job.signal(SIGTERM);
  const CommandResult stopped = job.wait(60);
  EXPECT_EQ(stopped.status, 128 + SIGTERM) << stopped.err;
  // There may also be an earlier state, and one that was being written.
  const auto left = generations();
  EXPECT_TRUE(std::any_of(left.begin(), left.end(), [&](const fs::path& path) {
    return stopped.err.find("remains in " + path.string() + " ") != std::string::npos;
  })) << stopped.err;
  EXPECT_THAT(stopped.err,
              AllOf(HasSubstr("doesn't exist"), HasSubstr("To resume from it, copy that folder to")));
}

TEST_F(PeerRestart, IsRefusedIfNothingRestartsRanks) {
  const auto refused = [&](const Words& more) {
    const CommandResult result =
        try_train(resumable(config_) + Words{"--checkpoint.peer_interval", "1"} + more);
    EXPECT_EQ(result.status, 2);
    return result.err;
  };
  // By the launcher, which marks the lines of ranks.
  EXPECT_THAT(refused({"--nproc", "2"}),
              AllOf(HasSubstr("pass it --max-restarts"), Not(HasSubstr("[rank "))));
  EXPECT_THAT(refused({}), HasSubstr("this rank has no launcher"));
  EXPECT_THAT(refused({"--checkpoint.no_enable"}), HasSubstr("needs checkpoint.enable = true"));
  EXPECT_THAT(refused({"--checkpoint.peer_folder", "here"}), HasSubstr("an absolute path"));
}

}  // namespace
}  // namespace titan::testing
