// `titan train` with sequences split over ranks: one rank's losses, and the same numbers in the logs.

#include "e2e/small_run.h"

namespace titan::testing {
namespace {

struct ContextLayout {
  const char* name;
  int batch_ranks;  // that read different rows
  int ranks;
  Words words;
};
void PrintTo(const ContextLayout& layout, std::ostream* out) { *out << layout.name; }

Words cp(const std::string& ranks, const std::string& degree, const Words& more = {}) {
  return Words{"--nproc", ranks, "--parallelism.context_parallel_degree", degree} + more;
}

class ContextParallelRun : public ::testing::TestWithParam<ContextLayout> {};

// Other layouts with as many ranks that read rows give the same mean over every rank's rows.
Words context_rows(const ContextLayout& layout) {
  const std::string rows = std::to_string(4 / layout.batch_ranks);
  return {"--training.local_batch_size", rows, "--validation.local_batch_size", rows};
}

Words without_cp(const ContextLayout& layout) { return {"--nproc", std::to_string(layout.batch_ranks)}; }

TEST_P(ContextParallelRun, LogsTheSameNumbersAsWithoutIt) {
  const ContextLayout& layout = GetParam();
  const Words base = small_run(fresh_folder("config")) + context_rows(layout);
  const auto folder = fresh_folder("spread"), plain = fresh_folder("plain");
  train(plain, base + without_cp(layout));
  train(folder, base + layout.words);

  expect_same_metrics(folder, plain);
  const Lines steps = read_lines(folder / "metrics.jsonl");
  for (size_t i = 0; i < steps.size(); ++i) {
    EXPECT_EQ(steps[i].at("n_tokens_seen"), static_cast<int64_t>(4 * 48 * (i + 1))) << i;
    const double tokens_of_a_rank = 4.0 * 48 / layout.ranks;
    EXPECT_NEAR(steps[i].at("tps").get<double>() * steps[i].at("step_s").get<double>(), tokens_of_a_rank,
                1e-3 * tokens_of_a_rank)
        << i;
  }
  expect_same_validation(folder, plain);
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, ContextParallelRun,
    ::testing::Values(
        ContextLayout{"Cp2", 1, 2, cp("2", "2")},
        ContextLayout{"Cp2AllToAll", 1, 2,
                      cp("2", "2", {"--parallelism.context_parallel_rotate_method", "alltoall"})},
        ContextLayout{"Cp2Tp2", 1, 4, cp("4", "2", {"--parallelism.tensor_parallel_degree", "2"})},
        ContextLayout{"Cp2AllGatherKv", 1, 2,
                      cp("2", "2", {"--parallelism.context_parallel_attention", "allgather_kv"})},
        ContextLayout{"Cp3Unbalanced", 1, 3,
                      cp("3", "3", {"--parallelism.context_parallel_load_balancer", "None"})},
        ContextLayout{"Cp2Fsdp2", 2, 4, cp("4", "2")},
        ContextLayout{"Cp2Ddp2", 2, 4,
                      cp("4", "2",
                         {"--parallelism.data_parallel_replicate_degree", "2",
                          "--parallelism.data_parallel_shard_degree", "1"})}),
    [](const auto& info) { return std::string(info.param.name); });

// TorchTitan's weights and batches, for all 20 steps.
TEST(ContextParallelReplay, MatchesOneRank) {
  const std::string folder = source_file("tests/data/parity/mini");
  const Words replay = {folder + "/replay.toml", "--training.dataset_path", folder,
                        "--checkpoint.initial_load_path", folder + "/titan.safetensors"};
  const auto one = train(fresh_folder("one"), replay),
             two = train(fresh_folder("two"), replay + cp("2", "2"));
  ASSERT_EQ(one.size(), 20u);
  ASSERT_EQ(two.size(), 20u);
  for (size_t i = 0; i < one.size(); ++i) EXPECT_NEAR(two[i].loss, one[i].loss, 5e-6) << i;
}

// Refused before any process computes.
std::string context_refusal(const Words& words) {
  const CommandResult result = try_train(
      Words{source_file("tests/data/parity/mini/replay.toml"), "--training.dataset_path",
            source_file("tests/data/parity/mini"), "--job.dump_folder", fresh_folder("refused").string()} +
      words);
  EXPECT_NE(result.status, 0);
  return result.err;
}

TEST(ContextParallelRefusals, SuggestWhatWouldWork) {
  EXPECT_THAT(
      context_refusal(cp("3", "3")),
      HasSubstr(
          "training.seq_len = 64: isn't a multiple of 2 x context_parallel_degree = 6; 60 or 66 would do"));
  EXPECT_THAT(context_refusal(cp("2", "2", {"--validation.enable", "--validation.seq_len", "30"})),
              HasSubstr("validation.seq_len = 30: isn't a multiple of 2 x context_parallel_degree = 4"));
  EXPECT_THAT(context_refusal(cp("2", "2",
                                 {"--parallelism.context_parallel_rotate_method", "alltoall",
                                  "--parallelism.context_parallel_attention", "allgather_kv"})),
              HasSubstr("is for ring attention"));
  EXPECT_THAT(context_refusal(cp("2", "2", {"--parallelism.context_parallel_load_balancer", "ptrr"})),
              HasSubstr("flex attention"));
}

}  // namespace
}  // namespace titan::testing
