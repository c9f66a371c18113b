// `titan train` with a pipeline: one rank's losses, the same numbers in the logs and in validation, and the
// reports of a lost rank.

#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <future>
#include <thread>

#include "e2e/held_steps.h"
#include "e2e/resume_run.h"

namespace titan::testing {
namespace {

struct PipelineLayout {
  const char* name;
  int batch_ranks;  // that read different rows
  Words words;
};
void PrintTo(const PipelineLayout& layout, std::ostream* out) { *out << layout.name; }

Words pp(const std::string& ranks, const std::string& degree, const std::string& schedule,
         const Words& more = {}) {
  return Words{"--nproc",
               ranks,
               "--parallelism.pipeline_parallel_degree",
               degree,
               "--parallelism.pipeline_parallel_schedule",
               schedule} +
         more;
}

Words pipeline_rows(const PipelineLayout& layout) {
  const std::string rows = std::to_string(4 / layout.batch_ranks);
  return {"--training.local_batch_size",   rows,
          "--validation.local_batch_size", rows,
          "--training.global_batch_size",  std::to_string(4 * layout.batch_ranks)};
}

class PipelineRun : public ::testing::TestWithParam<PipelineLayout> {};

// Four layers, so that two stages per rank have something to do.
TEST_P(PipelineRun, LogsTheSameNumbersAsWithoutPipelining) {
  const PipelineLayout& layout = GetParam();
  const Words base = small_run(fresh_folder("config")) + pipeline_rows(layout) +
                     Words{"--model.args.n_layers", "4", "--loss.name", "label_smoothing"};
  const auto folder = fresh_folder("spread"), plain = fresh_folder("plain");
  train(plain, base + Words{"--nproc", std::to_string(layout.batch_ranks)});
  train(folder, base + layout.words);
  expect_same_metrics(folder, plain);
  expect_same_validation(folder, plain);
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, PipelineRun,
    ::testing::Values(
        PipelineLayout{"Pp2", 1, pp("2", "2", "1F1B")}, PipelineLayout{"Pp2Gpipe", 1, pp("2", "2", "gpipe")},
        PipelineLayout{"Pp2Interleaved", 1, pp("2", "2", "Interleaved1F1B")},
        PipelineLayout{"Pp2ZeroBubbleV", 1, pp("2", "2", "ZBVZeroBubble")},
        PipelineLayout{"Pp2TwoRowsAtOnce", 1,
                       pp("2", "2", "1F1B", {"--parallelism.pipeline_parallel_microbatch_size", "2"})},
        PipelineLayout{"Pp2FromAFile", 1,
                       pp("2", "2", "PipelineScheduleSingle",
                          {"--parallelism.pipeline_parallel_schedule_csv",
                           source_file("docs/examples/schedules/zero_bubble.csv")})},
        PipelineLayout{"Pp3", 1, pp("3", "3", "1F1B")}, PipelineLayout{"Pp2Fsdp2", 2, pp("4", "2", "1F1B")},
        PipelineLayout{"Pp2Replicate2", 2,
                       pp("4", "2", "1F1B",
                          {"--parallelism.data_parallel_replicate_degree", "2",
                           "--parallelism.data_parallel_shard_degree", "1"})},
        PipelineLayout{
            "Pp2Tp2Checkpointed", 1,
            pp("4", "2", "1F1B",
               {"--parallelism.tensor_parallel_degree", "2", "--activation_checkpoint.mode", "full"})},
        PipelineLayout{"Pp2Cp2", 1,
                       pp("4", "2", "Interleaved1F1B", {"--parallelism.context_parallel_degree", "2"})}),
    [](const auto& info) { return std::string(info.param.name); });

// The schedules that the layouts above leave out, compared with one run without a pipeline. A balanced split
// places the four layers differently from the default split, which gives the last stage none.
TEST(PipelineSchedulesRun, LogTheSameNumbersAsWithoutPipelining) {
  const Words base = small_run(fresh_folder("config")) + pipeline_rows({"", 1, {}}) +
                     Words{"--model.args.n_layers", "4", "--loss.name", "z_loss"};
  const auto plain = fresh_folder("plain");
  train(plain, base);
  const std::pair<const char*, Words> layouts[] = {
      {"LoopedBFS", {"--parallelism.pipeline_parallel_split", "balanced"}},
      {"InterleavedZeroBubble", {}},
      {"DualPipeV", {}}};
  for (const auto& [schedule, more] : layouts) {
    SCOPED_TRACE(schedule);
    const auto folder = fresh_folder(schedule);
    train(folder, base + pp("2", "2", schedule, more));
    expect_same_metrics(folder, plain);
    expect_same_validation(folder, plain);
  }
}

// Both the first and the last stage have the matrix. The file stores it once, and both stages read it.
TEST(PipelineModelFile, HasTiedWeightsOnceForBothStages) {
  const Words base =
      small_run(fresh_folder("config")) + Words{"--model.args.tie_embeddings", "--checkpoint.enable",
                                                "--training.local_batch_size", "4", "--validation.no_enable"};
  const auto plain = fresh_folder("plain"), folder = fresh_folder("spread");
  const auto expected = train(plain, base), found = train(folder, base + pp("2", "2", "1F1B"));
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) EXPECT_NEAR(found[i].loss, expected[i].loss, 5e-6) << i;

  const auto file = folder / "checkpoint/step-4/model.safetensors";
  const Words again = base + Words{"--training.steps", "2", "--checkpoint.initial_load_path", file.string()};
  const auto wanted = train(fresh_folder("again"), again);
  const auto spread = train(fresh_folder("again_spread"), again + pp("2", "2", "ZBVZeroBubble"));
  ASSERT_EQ(spread.size(), wanted.size());
  for (size_t i = 0; i < wanted.size(); ++i) EXPECT_NEAR(spread[i].loss, wanted[i].loss, 5e-6) << i;
  EXPECT_LT(wanted[0].loss, expected[0].loss - 0.1);  // the model was read
}

// The stages' products, and so the tensors sent between them, are in bfloat16; sums and weights in float32.
TEST(PipelinePrecision, Bfloat16FollowsOneRank) {
  const Words base =
      small_run(fresh_folder("config")) + Words{"--training.local_batch_size", "4", "--validation.no_enable",
                                                "--training.mixed_precision_param", "bfloat16"};
  const auto expected = train(fresh_folder("plain"), base);
  const auto found = train(fresh_folder("spread"), base + pp("2", "2", "1F1B"));
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) {
    EXPECT_NEAR(found[i].loss, expected[i].loss, 2e-3) << i;
    EXPECT_NEAR(found[i].grad_norm, expected[i].grad_norm, 1e-2 * expected[i].grad_norm) << i;
  }
}

// Out of 4 MiB the first stage's two forwards get 2 MiB each, the last stage's single one all of it.
TEST(PipelineMemoryBudget, IsSharedByConcurrentForwards) {
  const CommandResult result = try_train(
      small_run(fresh_folder("config")) +
      pp("2", "2", "1F1B",
         {"--training.local_batch_size", "4", "--validation.no_enable", "--activation_checkpoint.mode",
          "memory_budget", "--activation_checkpoint.memory_budget_bytes", "4194304", "--job.dump_folder",
          fresh_folder("run").string()}));
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.out + result.err, HasSubstr("activations within 2.0 MiB for each forward"));
}

// ---- a loss that isn't finite

// The other ranks have no loss; the gradients of all stages follow from it.
TEST(PipelineFaults, ReportsANonFiniteLossWithTheLastStagesRank) {
  const CommandResult result =
      try_train(small_run(fresh_folder("config")) +
                pp("2", "2", "1F1B",
                   {"--training.local_batch_size", "4", "--validation.no_enable", "--optimizer.lr", "1e38",
                    "--job.dump_folder", fresh_folder("run").string()}));
  EXPECT_EQ(result.status, 3);
  EXPECT_THAT(result.err, HasSubstr("the loss isn't finite on rank 1"));
}

// ---- a lost rank

Command start_rank(int rank, int size, const std::string& port, const Words& words,
                   const Command::Variables& more = {}) {
  Command::Variables variables = {{"RANK", std::to_string(rank)},
                                  {"WORLD_SIZE", std::to_string(size)},
                                  {"MASTER_ADDR", "127.0.0.1"},
                                  {"MASTER_PORT", port},
                                  {"OMP_NUM_THREADS", "1"}};
  variables.insert(more.begin(), more.end());
  return Command(train_words(words), variables);
}

struct KilledRank {
  int pp;  // out of 4 ranks; with 2, two ranks share a stage's parameters
  int rank;
  int norm = 6;  // norm of the step before which the rank waits; 0: its first forward
};
void PrintTo(const KilledRank& killed, std::ostream* out) {
  *out << "rank " << killed.rank << ", pp " << killed.pp << ", norm " << killed.norm;
}

class LostRank : public ::testing::TestWithParam<KilledRank> {};

// Without a launcher to end them, all ranks notice the loss themselves: also ranks with live neighbors, also
// if the lost rank served the store that ranks report to, and also if only the rank that serves it notices
// the loss.
TEST_P(LostRank, IsNamedByAllRanksWithTheirCurrentAction) {
  const int lost = GetParam().rank;
  const auto folder = fresh_folder("run");
  const HeldSteps steps(fresh_folder("steps"));
  steps.hold(4);
  const Words words = small_run(fresh_folder("config")) +
                      Words{"--model.args.n_layers",
                            "4",
                            "--training.steps",
                            "1000000",
                            "--validation.no_enable",
                            "--training.local_batch_size",
                            "8",  // micro-batches; the lost rank is among the first
                            "--training.global_batch_size",
                            std::to_string(8 * 4 / GetParam().pp),
                            "--checkpoint.enable",  // so that the library is loaded
                            "--checkpoint.interval",
                            "1000000",
                            "--parallelism.pipeline_parallel_degree",
                            std::to_string(GetParam().pp),
                            "--job.dump_folder",
                            folder.string()} +
                      HeldSteps::words();
  const std::string port = some_port();
  std::vector<Command> ranks;
  Command::Variables held = steps.variables();
  held["TITAN_TEST_HELD_NORM"] = std::to_string(GetParam().norm);
  for (int rank = 0; rank < 4; ++rank)
    ranks.push_back(start_rank(rank, 4, port, words, rank == lost ? held : Command::Variables{}));
  ASSERT_TRUE(wait_until([&] { return steps.is_held(ranks[static_cast<size_t>(lost)].pid(), 4); }));
  std::this_thread::sleep_for(
      std::chrono::milliseconds(500));  // until the others wait for it in their actions
  ranks[static_cast<size_t>(lost)].signal(SIGKILL);
  // Reaped at once, as a launcher does: others on its host notice a process's end only when it is waited for.
  std::vector<std::future<CommandResult>> ends;
  for (Command& rank : ranks)
    ends.push_back(std::async(std::launch::async, [&rank] { return rank.wait(60); }));
  // Named by the neighbors that exchange messages with it; where ranks share parameters, the first to fail
  // may have waited for those, and repeats what all ranks report in the store.
  const std::string number = std::to_string(lost);
  const std::string by_neighbors = "rank " + number + " of the job";
  // NCCL tells nobody, and a call is aborted on all ranks. Rank 0 takes the job's store with it, which another rank may notice first.
  using Named = ::testing::Matcher<const std::string&>;
  const Named lost_rank = HasSubstr("lost: rank " + number + " (");
  const Named by_some =
      AnyOf(HasSubstr(by_neighbors), lost_rank, HasSubstr("rank 0 or its launcher: rank " + number + " ("));
  const Named by_all =
      AllOf(HasSubstr("in action "), GetParam().pp == 4 ? Named(HasSubstr(by_neighbors)) : by_some);
  const Named named = tests_on_gpu() ? by_some : by_all;
  for (int rank = 0; rank < 4; ++rank) {
    const CommandResult result = ends[static_cast<size_t>(rank)].get();
    if (rank == lost) continue;
    EXPECT_EQ(result.status, 1) << rank;
    EXPECT_THAT(result.err, named) << rank;
  }
}

INSTANTIATE_TEST_SUITE_P(PipelineFaults, LostRank,
                         ::testing::Values(KilledRank{4, 0}, KilledRank{4, 1}, KilledRank{4, 2},
                                           KilledRank{4, 3}, KilledRank{2, 1}, KilledRank{2, 1, 0},
                                           KilledRank{2, 2, 0}),
                         [](const auto& info) {
                           return "Rank" + std::to_string(info.param.rank) +
                                  (info.param.pp == 4 ? "" : "OfPp" + std::to_string(info.param.pp)) +
                                  (info.param.norm == 0 ? "BeforeItsForward" : "");
                         });

}  // namespace
}  // namespace titan::testing
