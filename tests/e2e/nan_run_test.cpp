// A NaN on one rank: debug.nan_trace, debug.detect_anomaly and the replay of the step where a run stops name
// the module; with fault_tolerance.on_nonfinite = "skip" all ranks skip the step.

#include "e2e/resume_run.h"

namespace titan::testing {
namespace {

struct NanLayout {
  const char* name;
  int ranks;
  int spoiled_rank;
  Words words;
};

void PrintTo(const NanLayout& layout, std::ostream* out) { *out << layout.name; }

class NanRun : public ::testing::TestWithParam<NanLayout> {
 protected:
  CommandResult run_spoiled(const std::string& module_and_place, const Words& debug) {
    const NanLayout& layout = GetParam();
    const Words words = train_words(
        resumable(fresh_folder("config")) +
        Words{"--experimental.custom_import", std::string(TITAN_BINARY_DIR) + "/lib/libspoiler.so",
              "--job.dump_folder", fresh_folder("run").string(), "--log-rank", "all"} +
        debug + layout.words + (layout.ranks > 1 ? ranks(layout.ranks) : Words{}));
    return run(words, {{"OMP_NUM_THREADS", "1"},
                       {"TITAN_TEST_SPOILED", std::to_string(layout.spoiled_rank) + " " + module_and_place}});
  }
  std::string rank() const { return "rank " + std::to_string(GetParam().spoiled_rank) + ": "; }
};

TEST_P(NanRun, NamesTheModuleOfAForward) {
  const CommandResult result = run_spoiled("layers.1.feed_forward.w2 forward", {"--debug.nan_trace"});
  EXPECT_EQ(result.status, 1) << result.err;
  EXPECT_THAT(result.err, AllOf(ContainsRegex("step [1-4], " + rank() +
                                              "the output of module 'layers.1.feed_forward.w2' is "
                                              "the first that isn't finite, though its inputs are"),
                                HasSubstr("1 NaN, 0 Inf"), HasSubstr("input 0: "), HasSubstr("weight: ")));
}

TEST_P(NanRun, NamesTheModuleOfABackward) {
  const CommandResult result = run_spoiled("layers.1.feed_forward.w2 backward", {"--debug.nan_trace"});
  EXPECT_EQ(result.status, 1) << result.err;
  EXPECT_THAT(
      result.err,
      ContainsRegex("step [1-4], " + rank() +
                    "the backward of module 'layers.1.feed_forward.w2' is the first to produce a gradient "
                    "that isn't finite"));
}

// The step is replayed for it: no trace was on before.
TEST_P(NanRun, TracesANonFiniteGradientToItsRankAndModule) {
  const CommandResult result = run_spoiled("layers.1.feed_forward.w2 backward", {});
  EXPECT_EQ(result.status, 3) << result.err;
  // All ranks say it, but the first to end may end the others before they have printed it.
  EXPECT_THAT(result.err,
              ContainsRegex("The replay found the source. step [1-4], " + rank() +
                            "the backward of module 'layers.1.feed_forward.w2' is the first to produce"));
  EXPECT_THAT(result.err,
              AllOf(HasSubstr("the gradient norm isn't finite, though the losses of all ranks are"),
                    HasSubstr("The optimizer step was not taken"), Not(HasSubstr("have non-finite values"))));
  const auto sums = HasSubstr("tensor-parallel ranks 0, 1 exchange parts of such numbers");
  if (std::string(GetParam().name) == "Tensor") {
    EXPECT_THAT(result.err, sums);
  } else {
    EXPECT_THAT(result.err, Not(sums));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, NanRun,
    ::testing::Values(NanLayout{"OneRank", 1, 0, {}},
                      NanLayout{"FsdpWithCheckpoints", 2, 1, {"--activation_checkpoint.mode", "full"}},
                      NanLayout{"Tensor", 2, 1, {"--parallelism.tensor_parallel_degree", "2"}},
                      NanLayout{"Pipeline",
                                2,
                                1,
                                {"--parallelism.pipeline_parallel_degree", "2", "--training.local_batch_size",
                                 "4"}}),
    [](const auto& info) { return info.param.name; });

// Both stages see it in their forward, and the loss belongs to the second.
TEST(NanRunInAPipeline, TracesALossToTheStageBefore) {
  const Words words =
      train_words(resumable(fresh_folder("config")) + ranks(2) +
                  Words{"--experimental.custom_import", std::string(TITAN_BINARY_DIR) + "/lib/libspoiler.so",
                        "--job.dump_folder", fresh_folder("run").string(),
                        "--parallelism.pipeline_parallel_degree", "2", "--training.local_batch_size", "4"});
  const CommandResult result =
      run(words, {{"OMP_NUM_THREADS", "1"}, {"TITAN_TEST_SPOILED", "0 layers.0.feed_forward.w2 forward"}});
  EXPECT_EQ(result.status, 3) << result.err;
  EXPECT_THAT(result.err,
              AllOf(HasSubstr("the loss isn't finite on rank 1"),
                    ContainsRegex("The replay found the source. step [1-4], rank 0: the output of module "
                                  "'layers.0.feed_forward.w2' is the first that isn't finite, though its")));
}

/// Two ranks; the second one's numbers are spoiled from the second step on: a step calls each module twice
/// (spoiler.cpp).
struct SkipLayout {
  const char* name;
  const char* where;
  Words words;
};

void PrintTo(const SkipLayout& layout, std::ostream* out) { *out << layout.name; }

class SkippedSteps : public ::testing::TestWithParam<SkipLayout> {
 protected:
  /// Ends after `steps` of them, and saves the model there.
  CommandResult run_steps(int steps, const std::filesystem::path& folder) {
    const Words words = resumable(fresh_folder("config")) + GetParam().words + ranks(2) +
                        Words{"--experimental.custom_import",
                              std::string(TITAN_BINARY_DIR) + "/lib/libspoiler.so",
                              "--fault_tolerance.on_nonfinite",
                              "skip",
                              "--training.steps",
                              std::to_string(steps),
                              "--job.dump_folder",
                              folder.string()};
    return run(train_words(words),
               {{"OMP_NUM_THREADS", "1"},
                {"TITAN_TEST_SPOILED", std::string("1 layers.1.feed_forward.w2 ") + GetParam().where}},
               100);
  }
};

TEST_P(SkippedSteps, LeaveTheWeightsUnchangedAndAreCounted) {
  const auto sound = fresh_folder("sound"), spoiled = fresh_folder("spoiled");
  CommandResult result = run_steps(1, sound);
  ASSERT_EQ(result.status, 0) << result.err;
  result = run_steps(3, spoiled);
  ASSERT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.err,
              HasSubstr("The optimizer step is skipped: number 2 in a row, number 2 of this run"));
  std::vector<int64_t> skipped;
  for (const auto& row : whole_rows(spoiled)) skipped.push_back(row.at("skipped_steps"));
  EXPECT_EQ(skipped, (std::vector<int64_t>{0, 1, 2}));
  const std::string weights = bytes_of(step_folder(spoiled, 3) / "model.safetensors");
  EXPECT_FALSE(weights.empty());
  EXPECT_TRUE(weights == bytes_of(step_folder(sound, 1) / "model.safetensors"));
}

INSTANTIATE_TEST_SUITE_P(Layouts, SkippedSteps,
                         ::testing::Values(SkipLayout{"Fsdp", "backward", {}},
                                           SkipLayout{"Tensor",
                                                      "forward",
                                                      {"--parallelism.tensor_parallel_degree", "2",
                                                       "--training.local_batch_size", "2"}},
                                           SkipLayout{
                                               "Pipeline",
                                               "forward",
                                               {"--parallelism.pipeline_parallel_degree", "2",
                                                "--training.local_batch_size", "4",
                                                "--parallelism.pipeline_parallel_microbatch_size", "2"}}),
                         [](const auto& info) { return info.param.name; });

TEST(NanRunTraces, DoNotChangeARunsNumbers) {
  const auto config = fresh_folder("config");
  const auto plain = train(fresh_folder("plain"), small_run(config));
  const auto traced =
      train(fresh_folder("traced"), small_run(config) + Words{"--debug.nan_trace", "--debug.detect_anomaly"});
  ASSERT_EQ(plain.size(), traced.size());
  for (size_t i = 0; i < plain.size(); ++i) {
    EXPECT_NEAR(plain[i].loss, traced[i].loss, 1e-5) << i;
    EXPECT_NEAR(plain[i].grad_norm, traced[i].grad_norm, 1e-4) << i;
  }
}

}  // namespace
}  // namespace titan::testing
