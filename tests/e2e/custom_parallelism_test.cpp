// docs/examples/custom_parallelism: a user's plan for a model that isn't a Llama.

#include "e2e/training.h"

namespace titan::testing {
namespace {

const Words kTp1 = {"--parallelism.tensor_parallel_degree", "1"};

Words config(const std::string& steps) {
  return {source_file("docs/examples/custom_parallelism/averager.toml"),
          "--training.steps",
          steps,
          "--metrics.log_freq",
          "1",
          "--experimental.custom_import",
          std::string(TITAN_BINARY_DIR) + "/lib/libaverager.so"};
}

TEST(CustomParallelism, LossFallsOnTwoByTwoRanks) {
  const auto steps = train(fresh_folder("run"), config("30") + Words{"--nproc", "4"});
  ASSERT_EQ(steps.size(), 30u);
  EXPECT_LT(steps.back().loss, steps.front().loss - 1.5);
}

struct Layout {
  const char* name;
  Words words;
};

TEST(CustomParallelism, HasTheSameLossesOnEveryLayout) {
  const auto one = train(fresh_folder("one"), config("8") + kTp1);
  ASSERT_EQ(one.size(), 8u);
  for (const Layout& layout :
       {Layout{"tp2", {"--nproc", "2"}},
        Layout{"tp2_whole_sequence", {"--nproc", "2", "--parallelism.no_enable_sequence_parallel"}},
        Layout{"tp2_whole_logits", {"--nproc", "2", "--parallelism.disable_loss_parallel"}},
        Layout{"tp4", {"--nproc", "4", "--parallelism.tensor_parallel_degree", "4"}},
        Layout{"tp2_fsdp2", {"--nproc", "4"}}}) {
    const auto many = train(fresh_folder(layout.name), config("8") + layout.words);
    ASSERT_EQ(many.size(), one.size()) << layout.name;
    for (size_t i = 0; i < one.size(); ++i) {
      EXPECT_NEAR(many[i].loss, one[i].loss, 5e-6) << layout.name << ", step " << i + 1;
      EXPECT_NEAR(many[i].grad_norm, one[i].grad_norm, 1e-4 * one[i].grad_norm) << layout.name;
    }
  }
}

TEST(CustomParallelism, PrintsItsPlan) {
  const CommandResult result = try_train(config("8") + Words{"--print-plan", "--nproc", "4"});
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.out, AllOf(HasSubstr("averager small on 4 rank(s): dp_shard 2, tp 2"),
                                HasSubstr("blocks.0..1.value"), HasSubstr("reduce-scatter / all-gather"),
                                // LibTorch has no gradient of a running sum without data.
                                HasSubstr("The step can't be run without data: aten::flip")));
}

// Without such a plan all ranks of the tensor-parallel axis would do the same work.
TEST(CustomParallelism, RefusesTensorParallelismThatThePlanLacks) {
  const CommandResult result = try_train(config("2") + Words{"--nproc", "2", "--parallelism.plan="});
  EXPECT_NE(result.status, 0);
  EXPECT_THAT(result.err, HasSubstr("tensor_parallel_degree = 2: the parallelism plan of averager has no "
                                    "tensor parallelism"));
}

}  // namespace
}  // namespace titan::testing
