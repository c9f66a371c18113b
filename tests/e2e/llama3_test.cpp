// The README's first command, short: Llama 3 on real text over two ranks.

#include "e2e/training.h"

namespace titan::testing {
namespace {

Words debug_config() {
  return {source_file("configs/llama3_debug.toml"), "--model.hf_assets_path",
          source_file("assets/tokenizer")};
}

TEST(Llama3Debug, LossFallsOnTwoRanks) {
  auto steps = train(fresh_folder("run"), debug_config() + Words{"--nproc", "2", "--training.steps", "12",
                                                                 "--training.seq_len", "128"});
  ASSERT_EQ(steps.size(), 12u);
  EXPECT_NEAR(steps.front().loss, 7.8, 0.5);  // ln 2048 = 7.62, and a little from unequal initial logits
  EXPECT_LT(steps.back().loss, steps.front().loss - 1);
}

// One rank in bfloat16 keeps a cast of its weights: it has to follow the optimizer.
TEST(Llama3Debug, LossFallsOnOneRank) {
  for (const char* implementation : {"fused", "foreach"}) {
    auto steps = train(fresh_folder(implementation),
                       debug_config() + Words{"--training.steps", "8", "--training.seq_len", "64",
                                              "--optimizer.implementation", implementation});
    ASSERT_EQ(steps.size(), 8u);
    EXPECT_LT(steps.back().loss, steps.front().loss - 0.5) << implementation;
  }
}

TEST(Llama3Debug, PresetsAreAccepted) {
  for (const char* name : {"llama3_debug", "llama3_8b", "llama3_70b", "llama3_405b"}) {
    CommandResult result =
        try_train({source_file(std::string("configs/") + name + ".toml"), "--print-config"});
    EXPECT_EQ(result.status, 0) << name << ": " << result.err;
  }
}

}  // namespace
}  // namespace titan::testing
