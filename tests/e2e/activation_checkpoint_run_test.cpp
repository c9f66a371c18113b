// `titan train` in every mode of [activation_checkpoint] has the losses and norms of a run without it, to the
// last bit.

#include "e2e/training.h"

namespace titan::testing {
namespace {

Words recomputed_run() {
  return {source_file("configs/llama3_debug.toml"),
          "--model.hf_assets_path",
          source_file("assets/tokenizer"),
          "--training.steps",
          "3",
          "--training.seq_len",
          "64",
          "--training.global_batch_size",
          "8",
          "--training.local_batch_size",
          "2",
          "--nproc",
          "2"};
}

std::vector<double> numbers_of(const std::string& name, const Words& words) {
  std::vector<double> numbers;
  for (const Logged& step : train(fresh_folder(name), recomputed_run() + words))
    numbers.insert(numbers.end(), {step.loss, step.grad_norm});
  return numbers;
}

Words mode(const std::string& name) { return {"--activation_checkpoint.mode", name}; }
const Words kOp = mode("selective") + Words{"--activation_checkpoint.selective_ac_option", "op"};

TEST(ActivationCheckpointRun, EveryModeHasTheSameNumbers) {
  const auto expected = numbers_of("none", {});
  ASSERT_EQ(expected.size(), 6u);
  EXPECT_EQ(numbers_of("full", mode("full")), expected);
  EXPECT_EQ(numbers_of("layers", mode("selective")), expected);
  EXPECT_EQ(numbers_of("op", kOp), expected);
  EXPECT_EQ(numbers_of("op_to_the_end", kOp + Words{"--activation_checkpoint.early_stop", "false"}),
            expected);
  EXPECT_EQ(numbers_of("budget", mode("memory_budget")), expected);
}

TEST(ActivationCheckpointRun, EveryModeHasTheSameNumbersUnderTensorParallelism) {
  const Words tp{"--parallelism.tensor_parallel_degree", "2"};
  const auto expected = numbers_of("none", tp);
  EXPECT_EQ(numbers_of("full", tp + mode("full")), expected);
  EXPECT_EQ(numbers_of("op", tp + kOp), expected);
  EXPECT_EQ(numbers_of("budget", tp + mode("memory_budget")), expected);
}

TEST(ActivationCheckpointRun, PrintsABudgetAsATable) {
  const auto result = try_train(recomputed_run() + mode("memory_budget") +
                                Words{"--job.dump_folder", fresh_folder("table").string()});
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_NE(result.err.find("MiB for each forward"), std::string::npos) << result.err;
  EXPECT_NE(result.err.find("ms recomputed each"), std::string::npos) << result.err;
}

std::string recompute_refusal(const Words& words) {
  const auto result =
      try_train(recomputed_run() + words + Words{"--job.dump_folder", fresh_folder("refused").string()});
  EXPECT_NE(result.status, 0) << result.err;
  return result.err;
}

TEST(ActivationCheckpointRun, RefusesImpossibleSettings) {
  if (!tests_on_gpu())
    EXPECT_NE(recompute_refusal(mode("offload"))
                  .find("activation_checkpoint.mode = offload: moves activations from a GPU"),
              std::string::npos);
  EXPECT_NE(
      recompute_refusal(mode("memory_budget") + Words{"--activation_checkpoint.memory_budget_bytes", "1000"})
          .find("less than"),
      std::string::npos);
  const std::string no_layer =
      recompute_refusal(mode("selective") + Words{"--activation_checkpoint.selective_ac_option", "7"});
  EXPECT_NE(no_layer.find("activation_checkpoint.selective_ac_option = 7: selects no layer: the model has 6"),
            std::string::npos);
  EXPECT_EQ(no_layer.find("[rank "), std::string::npos) << "the launcher refuses it";
  EXPECT_NE(recompute_refusal(mode("full") + Words{"--activation_checkpoint.memory_budget_bytes", "1000000"})
                .find("memory_budget_bytes = 1000000: is read only with activation_checkpoint.mode"),
            std::string::npos);
}

}  // namespace
}  // namespace titan::testing
