// docs/examples/custom_parallelism: a plan for a model that isn't a Llama, and a parallelism with its own
// communication, both registered by a shared object.

#include "e2e/training.h"

namespace titan::testing {
namespace {

const Words kTp1 = {"--parallelism.tensor_parallel_degree", "1"};

Words averager_config(const std::string& steps) {
  return {source_file("docs/examples/custom_parallelism/averager.toml"),
          "--training.steps",
          steps,
          "--metrics.log_freq",
          "1",
          "--experimental.custom_import",
          std::string(TITAN_BINARY_DIR) + "/lib/libaverager.so"};
}

TEST(CustomParallelism, LossFallsOnTwoByTwoRanks) {
  const auto steps = train(fresh_folder("run"), averager_config("30") + Words{"--nproc", "4"});
  ASSERT_EQ(steps.size(), 30u);
  EXPECT_LT(steps.back().loss, steps.front().loss - 1.5);
}

struct CustomLayout {
  const char* name;
  Words words;
};

Words slices(const std::string& degree) { return {"--parallelism.args.slices.degree", degree}; }

void expect_one_ranks_losses(const std::vector<CustomLayout>& layouts) {
  const auto one = train(fresh_folder("one"), averager_config("4") + kTp1);
  ASSERT_EQ(one.size(), 4u);
  for (const CustomLayout& layout : layouts) {
    const auto many = train(fresh_folder(layout.name), averager_config("4") + layout.words);
    ASSERT_EQ(many.size(), one.size()) << layout.name;
    for (size_t i = 0; i < one.size(); ++i) {
      EXPECT_NEAR(many[i].loss, one[i].loss, 5e-6) << layout.name << ", step " << i + 1;
      EXPECT_NEAR(many[i].grad_norm, one[i].grad_norm, 1e-4 * one[i].grad_norm) << layout.name;
    }
  }
}

TEST(CustomParallelism, HasTheSameLossesOnFourRanks) {
  expect_one_ranks_losses(
      {{"tp2_fsdp2", {"--nproc", "4"}},
       {"slices2_fsdp2", Words{"--nproc", "4"} + kTp1 + slices("2")},
       {"slices2_tp2", Words{"--nproc", "4"} + slices("2")},
       {"slices2_tp2_whole_sequence",
        Words{"--nproc", "4", "--parallelism.no_enable_sequence_parallel"} + slices("2")}});
}

TEST(CustomParallelism, HasTheSameLossesOnOneAxis) {
  expect_one_ranks_losses(
      {{"tp2", {"--nproc", "2"}},
       {"tp2_whole_sequence", {"--nproc", "2", "--parallelism.no_enable_sequence_parallel"}},
       {"tp2_whole_logits", {"--nproc", "2", "--parallelism.disable_loss_parallel"}},
       {"tp4", {"--nproc", "4", "--parallelism.tensor_parallel_degree", "4"}},
       {"slices2", Words{"--nproc", "2"} + kTp1 + slices("2")},
       {"slices4", Words{"--nproc", "4"} + kTp1 + slices("4")}});
}

TEST(CustomParallelism, PrintsItsPlan) {
  const CommandResult result = try_train(averager_config("8") + Words{"--print-plan", "--nproc", "4"});
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.out, AllOf(HasSubstr("averager small on 4 rank(s): dp_shard 2, tp 2"),
                                HasSubstr("blocks.0..1.value"), HasSubstr("reduce-scatter / all-gather"),
                                // LibTorch can't compute a running sum's gradient without data.
                                HasSubstr("The step can't be run without data: aten::flip")));
}

// The ranks of an axis that the plan ignores would all do the same work.
TEST(CustomParallelism, RefusesADegreeThatThePlanIgnores) {
  const Words own_plan = averager_config("2") + Words{"--nproc", "2", "--parallelism.plan="};
  const CommandResult tensor = try_train(own_plan);
  EXPECT_NE(tensor.status, 0);
  EXPECT_THAT(tensor.err, HasSubstr("tensor_parallel_degree = 2: the parallelism plan of averager has no "
                                    "tensor parallelism"));
  const CommandResult sliced = try_train(own_plan + kTp1 + slices("2"));
  EXPECT_NE(sliced.status, 0);
  EXPECT_THAT(sliced.err,
              HasSubstr("parallelism.args.slices.degree = 2: the parallelism plan of averager has "
                        "no slices parallelism"));
}

TEST(CustomParallelism, ChecksTheSettingsOfARegisteredParallelism) {
  const auto error_of = [](const Words& words) {
    const CommandResult result = try_train(averager_config("2") + kTp1 + words);
    EXPECT_NE(result.status, 0);
    return result.err;
  };
  EXPECT_THAT(
      error_of(Words{"--nproc", "3"} + slices("3")),
      HasSubstr("training.seq_len = 128: isn't a multiple of args.slices.degree = 3; 126 or 129 would "
                "do"));
  EXPECT_THAT(error_of(Words{"--nproc", "4"} + slices("3")), HasSubstr("x cp 1 x slices 3 x tp 1"));
  EXPECT_THAT(error_of(slices("0")), HasSubstr("parallelism.args.slices.degree"));
  EXPECT_THAT(error_of({"--parallelism.args.slices.degre", "2"}), HasSubstr("unknown key"));
}

}  // namespace
}  // namespace titan::testing
