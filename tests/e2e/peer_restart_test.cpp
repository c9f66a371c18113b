// A run that keeps its state in memory, and whose ranks are killed: it goes on from there, without a state on
// disk, and is the run that nobody disturbed.

#include <signal.h>

#include <algorithm>

#include "e2e/live_run.h"
#include "e2e/resume_run.h"

namespace titan::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
namespace fs = std::filesystem;

const Command::Variables kOneThread = {{"OMP_NUM_THREADS", "1"}};

class PeerRestart : public ::testing::Test {
 protected:
  /// 40 steps; on disk nothing but the model after the last, unless `more` says so.
  Words words(const Words& more = {}) const {
    return resumable(config_) + Words{"--nproc",
                                      "3",
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

  /// Complete ones.
  std::vector<fs::path> generations() const {
    std::vector<fs::path> found;
    std::error_code changing;
    for (const auto& folder : fs::directory_iterator(memory_, changing))
      for (const auto& entry : fs::directory_iterator(folder.path(), changing))
        if (entry.path().filename().string().starts_with("step-")) found.push_back(entry.path());
    return found;
  }
  bool is_kept(const std::string& step) const {
    const auto all = generations();
    return std::any_of(all.begin(), all.end(), [&](const fs::path& path) { return path.filename() == step; });
  }

  /// One of its ranks, once `step` was logged and something is kept; returns when others are there.
  void kill_rank(const Command& job, size_t rank, int64_t step, size_t num_ranks = 3) const {
    std::vector<int> ranks;
    ASSERT_TRUE(wait_until([&] {
      ranks = ranks_of(job);
      return ranks.size() == num_ranks && last_logged_step(run_) >= step && !generations().empty();
    })) << "step "
        << last_logged_step(run_);
    ::kill(ranks[rank], SIGKILL);
    ASSERT_TRUE(wait_until([&] {
      const std::vector<int> now = ranks_of(job);
      return !now.empty() && std::find(ranks.begin(), ranks.end(), now.front()) == ranks.end();
    }));
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
};

TEST_F(PeerRestart, AKilledRankCostsNoReadOfTheDisk) {
  Command job(train_words(with_peers("1")), kOneThread);
  kill_rank(job, 1, 10);
  kill_rank(job, 0, 22);
  const CommandResult result = job.wait(100);
  ASSERT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.err,
              AllOf(HasSubstr("restart 2 of 9"), HasSubstr("is in memory; the newest on disk is none"),
                    HasSubstr("loaded from " + memory_.string()), HasSubstr("on one host")));
  EXPECT_THAT(result.err, Not(HasSubstr("loaded from " + run_.string())));
  EXPECT_TRUE(fs::is_empty(memory_)) << "the job's folder goes with it";
  expect_same_curve(words(), 0);
}

TEST_F(PeerRestart, FewerRanksGoOnFromTheSameMemory) {
  const Words elastic = {"--min-ranks", "2", "--rejoin-after", "never"};
  Command job(train_words(with_peers("1", elastic)), kOneThread);
  kill_rank(job, 2, 10);
  const CommandResult result = job.wait(100);
  ASSERT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.err, AllOf(HasSubstr("2 of 3 ranks"), HasSubstr("loaded from " + memory_.string())));
  expect_same_curve(words(), 1e-5);
}

TEST_F(PeerRestart, DamageInMemoryGivesWayToTheDisk) {
  const Words on_disk = {"--checkpoint.interval",      "41", "--training.steps", "80",
                         "--lr_scheduler.total_steps", "80"};
  Command job(train_words(with_peers("42", on_disk)), kOneThread);
  ASSERT_TRUE(wait_until([&] { return is_kept("step-42"); }));
  for (const auto& file : fs::directory_iterator(generations().front())) {
    if (file.path().extension() != ".safetensors") continue;
    std::fstream stream(file.path(), std::ios::in | std::ios::out | std::ios::binary);
    stream.seekp(-4, std::ios::end);
    stream.write("\x55\x55\x55\x55", 4);
  }
  kill_rank(job, 1, 42);
  const CommandResult result = job.wait(100);
  ASSERT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.err, AllOf(HasSubstr("passed over: step 42 in memory"), HasSubstr("checksum"),
                                HasSubstr("the run goes on behind step 41, loaded from " + run_.string())));
  expect_same_curve(words(on_disk), 0);
}

// Its launcher is killed, so that nobody tidies up; the next one is another job in the same folder.
TEST_F(PeerRestart, AnotherJobStartsAnew) {
  {
    Command job(train_words(with_peers("1")), kOneThread);
    ASSERT_TRUE(wait_until([&] { return last_logged_step(run_) >= 5 && !generations().empty(); }));
    const std::vector<int> ranks = ranks_of(job);
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

TEST_F(PeerRestart, AJobThatGivesUpLeavesNothing) {
  Command job(train_words(with_peers("1", {}, "1")), kOneThread);
  kill_rank(job, 1, 3);
  ASSERT_TRUE(wait_until([&] { return ranks_of(job).size() == 3 && last_logged_step(run_) >= 6; }));
  ::kill(ranks_of(job).at(0), SIGKILL);
  EXPECT_EQ(job.wait(60).status, 128 + SIGKILL);
  EXPECT_TRUE(fs::is_empty(memory_));
}

TEST_F(PeerRestart, WhereNobodyStartsRanksAgainItIsRefused) {
  const auto refused = [&](const Words& more) {
    const CommandResult result =
        try_train(resumable(config_) + Words{"--checkpoint.peer_interval", "1"} + more);
    EXPECT_EQ(result.status, 2);
    return result.err;
  };
  EXPECT_THAT(refused({"--nproc", "2"}), HasSubstr("give it --max-restarts"));
  EXPECT_THAT(refused({}), HasSubstr("nobody launched this rank"));
  EXPECT_THAT(refused({"--checkpoint.no_enable"}), HasSubstr("takes checkpoint.enable = true"));
  EXPECT_THAT(refused({"--checkpoint.peer_folder", "here"}), HasSubstr("an absolute path"));
}

}  // namespace
}  // namespace titan::testing
