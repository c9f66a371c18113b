// A run whose ranks are killed and return equals an undisturbed run: 4, 3, 2 and again 4 ranks share the same
// rows of each step. TITAN_TEST_KILLS sets the number of disturbances; 3 by default, many under the nightly
// label.

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <random>

#include "e2e/live_run.h"
#include "e2e/resume_run.h"

namespace titan::testing {
namespace {

constexpr int kStepsBetween = 15;  // between two disturbances

int num_disturbances() {
  const char* number = std::getenv("TITAN_TEST_KILLS");
  return number ? std::atoi(number) : 3;
}

Words elastic_words(const Words& words, const fs::path& run) {
  return words + Words{"--job.dump_folder", run.string(), "--max-restarts",  "1000", "--min-ranks", "2",
                       "--rejoin-after",    "never",      "--longest-delay", "0"};
}

/// The ranks, as soon as that many have logged a step from `step` on; otherwise none.
std::vector<int> ranks_that_train(const Command& job, size_t count, const fs::path& run, int64_t step) {
  return ranks_once(job, count, [&](const auto&) { return last_logged_step(run) >= step; });
}

// Four ranks lose one at a time; once two are left, the other two are brought back.
void disturb(const Command& job, const fs::path& run, int number, std::mt19937& random) {
  size_t num_ranks = 4;
  for (int i = 1; i <= number; ++i) {
    const std::vector<int> ranks = ranks_that_train(job, num_ranks, run, i * kStepsBetween);
    ASSERT_FALSE(ranks.empty()) << "disturbance " << i << ": " << ranks_of(job).size() << " ranks, step "
                                << last_logged_step(run);
    usleep(static_cast<useconds_t>(random() % 50'000));
    if (num_ranks == 2) {
      job.signal(SIGUSR2);
      num_ranks = 4;
    } else {
      ::kill(ranks[random() % ranks.size()], SIGKILL);
      --num_ranks;
    }
    ASSERT_TRUE(are_replaced(job, ranks));
  }
}

TEST(Elastic, KillingAndReturningRanksDoesNotChangeTheRun) {
  const int number = num_disturbances(), steps = (number + 2) * kStepsBetween;
  Words words = resumable(fresh_folder("config")) + Words{"--nproc",
                                                          "4",
                                                          "--training.steps",
                                                          std::to_string(steps),
                                                          "--lr_scheduler.total_steps",
                                                          std::to_string(steps),
                                                          "--checkpoint.interval",
                                                          "2",
                                                          "--checkpoint.keep_latest_k",
                                                          "3"};
  // Rounding grows over many steps: in double precision it stays below the tolerance.
  if (number > 3)
    for (const char* key : {"dtype", "mixed_precision_param", "mixed_precision_reduce"})
      words = words + Words{std::string("--training.") + key, "float64"};
  const auto straight = fresh_folder("straight"), run = fresh_folder("run");
  train_log(straight, words);

  std::mt19937 random = random_generator();
  Command job(train_words(elastic_words(words, run)), {{"OMP_NUM_THREADS", "1"}});
  disturb(job, run, number, random);
  const CommandResult result = job.wait(100);
  ASSERT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.err, AllOf(HasSubstr("3 of 4 ranks"), HasSubstr("2 of 4 ranks")));
  if (number >= 3) EXPECT_THAT(result.err, HasSubstr("4 of 4 ranks"));

  const Curve expected = curve_of(straight);
  ASSERT_EQ(expected.size(), static_cast<size_t>(steps));
  expect_near(curve_of(run), expected);
}

// The others' watchdogs give up on it, and the launcher sees that it was stopped.
TEST(Elastic, ContinuesWithoutAHungRank) {
  const auto run = fresh_folder("run");
  const Words words = resumable(fresh_folder("config")) + Words{"--nproc",
                                                                "3",
                                                                "--training.steps",
                                                                "40",
                                                                "--checkpoint.interval",
                                                                "10",
                                                                "--comm.init_timeout_seconds",
                                                                "60",
                                                                "--comm.train_timeout_seconds",
                                                                "4"};
  Command job(train_words(elastic_words(words, run)), {{"OMP_NUM_THREADS", "1"}});
  const std::vector<int> ranks = ranks_that_train(job, 3, run, 12);
  ASSERT_EQ(ranks.size(), 3u);
  ::kill(ranks[1], SIGSTOP);
  const CommandResult result = job.wait(90);
  ASSERT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.err,
              AllOf(HasSubstr("rank 1 is lost (hung"), HasSubstr("2 of 3 ranks, at places 0, 2")));
  EXPECT_EQ(curve_of(run).size(), 40u);
}

// The steps of the smaller group since its start are on disk only because it was asked to stop. The ranks are
// tensor-parallel pairs, which share their rows.
TEST(Elastic, GrowingLosesNoStep) {
  const auto run = fresh_folder("run"), bin = fresh_folder("bin"), told = fake_scontrol(bin, 0);
  const Words words = resumable(fresh_folder("config")) + Words{"--nproc",
                                                                "4",
                                                                "--parallelism.tensor_parallel_degree",
                                                                "2",
                                                                "--training.steps",
                                                                "150",
                                                                "--lr_scheduler.total_steps",
                                                                "150",
                                                                "--checkpoint.interval",
                                                                "1000",
                                                                "--fault_tolerance.requeue_on",
                                                                "SIGTERM"};
  Command job(train_words(elastic_words(words, run)), {{"OMP_NUM_THREADS", "1"},
                                                       {"SLURM_JOB_ID", "123"},
                                                       {"PATH", bin.string() + ":" + std::getenv("PATH")}});
  const std::vector<int> first = ranks_that_train(job, 4, run, 2);
  ASSERT_EQ(first.size(), 4u);
  ::kill(first[3], SIGKILL);
  // The ranks of the smaller group, not two that remain of the larger one; and steps that it made itself.
  ASSERT_TRUE(are_replaced(job, first, 2));
  const int64_t logged = last_logged_step(run);
  ASSERT_TRUE(wait_until([&] { return last_logged_step(run) >= std::max<int64_t>(6, logged + 1); }));
  job.signal(SIGUSR2);
  const CommandResult result = job.wait(tests_on_gpu() ? 300 : 90);
  ASSERT_EQ(result.status, 0) << result.err;
  const int64_t stopped = number_after(result.err, "stops the run after step ");
  EXPECT_GE(stopped, 6) << result.err;
  EXPECT_EQ(number_after(result.err, "resuming after step "), stopped) << result.err;
  EXPECT_THAT(result.err, HasSubstr("the state after step " + std::to_string(stopped) + " is saved"));
  EXPECT_THAT(result.err, AllOf(HasSubstr("2 of 4 ranks"), HasSubstr("4 of 4 ranks")));
  EXPECT_EQ(curve_of(run).size(), 150u);
  EXPECT_FALSE(fs::exists(told)) << "ranks that the launcher restarts put the job back into the queue";
}

// A batch has as many rows as the whole job has ranks, whatever number remains.
TEST(Elastic, ValidationIsTheSameOnFewerRanks) {
  const auto config = fresh_folder("config"), straight = fresh_folder("straight"), run = fresh_folder("run");
  const Words words = resumable(config) + Words{"--nproc",
                                                "3",
                                                "--validation.enable",
                                                "--validation.dataset_path",
                                                write_text(config),
                                                "--validation.local_batch_size",
                                                "2",
                                                "--validation.freq",
                                                "4",
                                                "--validation.steps",
                                                "2"};
  train_log(straight, words);
  Command job(train_words(elastic_words(words, run)), {{"OMP_NUM_THREADS", "1"}});
  const std::vector<int> ranks = ranks_that_train(job, 3, run, 2);
  ASSERT_EQ(ranks.size(), 3u);
  ::kill(ranks[2], SIGKILL);
  const CommandResult result = job.wait(90);
  ASSERT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.err, HasSubstr("2 of 3 ranks"));
  const Lines expected = read_lines(straight / "validation.jsonl"),
              found = read_lines(run / "validation.jsonl");
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) {
    EXPECT_EQ(found[i].at("step"), expected[i].at("step"));
    EXPECT_NEAR(found[i].at("loss"), expected[i].at("loss"), 1e-5) << found[i];
  }
}

// An unsound state is never resumed from automatically.
TEST(Elastic, DoesNotRestartAnUnsoundRun) {
  const auto run = fresh_folder("run");
  const Words words = resumable(fresh_folder("config")) + Words{"--nproc",
                                                                "2",
                                                                "--optimizer.lr",
                                                                "1e30",
                                                                "--training.max_norm",
                                                                "1e30",
                                                                "--lr_scheduler.warmup_steps",
                                                                "0"};
  Command job(train_words(elastic_words(words, run)), {{"OMP_NUM_THREADS", "1"}});
  const CommandResult result = job.wait(60);
  EXPECT_EQ(result.status, 3) << result.err;
  EXPECT_THAT(result.err, AllOf(HasSubstr("isn't finite"), HasSubstr("no restart: exit code 3"),
                                ::testing::Not(HasSubstr("is lost"))));
}

TEST(Elastic, RefusesSettingsThatPreventARestart) {
  const Words words = resumable(fresh_folder("config")) + Words{"--max-restarts", "1"};
  const auto refused = [&](const Words& more) {
    const CommandResult result = try_train(words + more);
    EXPECT_EQ(result.status, 2);
    return result.err;
  };
  EXPECT_THAT(refused({}), HasSubstr("--max-restarts needs --nproc"));
  EXPECT_THAT(refused({"--nproc", "2", "--checkpoint.no_enable"}),
              HasSubstr("with --max-restarts must be true"));
  EXPECT_THAT(refused({"--nproc", "2", "--checkpoint.load_step", "5"}),
              HasSubstr("with --max-restarts must be -1"));
  EXPECT_THAT(refused({"--nproc", "2", "--checkpoint.exclude_from_loading", "optimizer"}),
              HasSubstr("with --max-restarts must be empty"));
  EXPECT_THAT(refused({"--nproc", "2", "--min-ranks", "1", "--training.global_batch_size", "-1"}),
              HasSubstr("with --max-restarts and --min-ranks must be a number"));
  EXPECT_THAT(refused({"--nproc", "4", "--min-ranks", "2", "--parallelism.data_parallel_shard_degree", "4"}),
              HasSubstr("--min-ranks 2: no number of ranks from 2 to 3 fits the job's settings"));
}

// The same for ranks that titan launch or torchrun restarts.
TEST(Elastic, LaunchedRanksRefuseSettingsThatPreventARestart) {
  const Words words = resumable(fresh_folder("config")) +
                      Words{"--job.dump_folder", fresh_folder("run").string(), "--training.steps", "5"};
  const auto launched = [&](const Words& launcher, const Words& more) {
    return run(
        Words{titan_program(), "launch", "-n", "1"} + launcher + Words{"--"} + train_words(words + more),
        {{"OMP_NUM_THREADS", "1"}});
  };
  const CommandResult refused = launched({"--max-restarts", "1"}, {"--checkpoint.load_step", "5"});
  EXPECT_EQ(refused.status, 2) << refused.err;
  EXPECT_THAT(refused.err,
              HasSubstr("--checkpoint.load_step = 5: with --max-restarts must be -1, the newest: "
                        "otherwise each restart goes back to this step"));
  EXPECT_THAT(launched({}, {"--checkpoint.load_step", "5"}).err,
              ::testing::Not(HasSubstr("with --max-restarts")));
}

}  // namespace
}  // namespace titan::testing
