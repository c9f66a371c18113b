// docs/examples/custom_optimizer: Lion, registered by a shared object.

#include "e2e/resume_run.h"

namespace titan::testing {
namespace {

Words lion(const Words& words) {
  return words + Words{"--experimental.custom_import",
                       std::string(TITAN_BINARY_DIR) + "/lib/liblion.so",
                       "--optimizer.name",
                       "lion",
                       "--optimizer.lr",
                       "1e-3"};
}

TEST(CustomOptimizer, LossFalls) {
  const auto steps = train(fresh_folder("run"), lion(resumable(fresh_folder("config"))));
  ASSERT_EQ(steps.size(), 20u);
  EXPECT_LT(steps.back().loss, steps.front().loss - 1);
}

TEST(CustomOptimizer, ResumesBitEqualOnTheSameRanks) {
  const Words words = lion(resumable(fresh_folder("config"))) + ranks(2);
  const auto straight = fresh_folder("straight"), run = fresh_folder("run");
  train(straight, words);
  train(run, part_of_run(words, 10));
  train(run, words);
  EXPECT_EQ(curve_of(run), curve_of(straight));
}

// Every part of the run has another layout: the state is resharded four times.
TEST(CustomOptimizer, ResumesOnOtherRanksWithTheSameCurve) {
  const Words words = lion(resumable(fresh_folder("config")));
  const auto straight = fresh_folder("straight"), run = fresh_folder("run");
  train(straight, words);
  int steps = 0;
  for (const Words& layout : {ranks(2), ranks(2, kTensor2), ranks(2, kPipeline2), ranks(3)})
    train(run, part_of_run(words + layout, steps += 5));
  expect_near(curve_of(run), curve_of(straight));
}

TEST(CustomOptimizer, SavesItsOwnState) {
  const Words words = resumable(fresh_folder("config"));
  const auto run = fresh_folder("run");
  train(run, part_of_run(lion(words), 5));
  EXPECT_THAT(train_log(run, words, 2), HasSubstr("exp_avg_sq"));  // only AdamW has it
  const CommandResult check = try_train(words + Words{"--check", "--job.dump_folder", run.string()});
  EXPECT_EQ(check.status, 2);
  EXPECT_THAT(check.err, HasSubstr("was saved with another optimizer, which keeps exp_avg, step; AdamW keeps "
                                   "exp_avg, exp_avg_sq, step"));
  EXPECT_THAT(try_train(lion(words) + Words{"--check", "--job.dump_folder", run.string()}).err,
              Not(HasSubstr("another optimizer")));
}

TEST(CustomOptimizer, TakesItsSettingsFromItsTable) {
  const Words words = lion(resumable(fresh_folder("config"))) + Words{"--training.steps", "5"};
  const auto plain = fresh_folder("plain"), other = fresh_folder("other"), group = fresh_folder("group");
  train(plain, words);
  train(other, words + Words{"--optimizer.args.beta2", "0.5"});
  train(group, words + Words{"--optimizer.param_groups", "norm: lr=0"});
  EXPECT_EQ(curve_of(other).at(2), curve_of(plain).at(2));  // no average before the first step
  EXPECT_NE(curve_of(other).at(3), curve_of(plain).at(3));
  EXPECT_NE(curve_of(group).at(2), curve_of(plain).at(2));
}

TEST(CustomOptimizer, RefusesUnknownSettings) {
  const Words words = lion(resumable(fresh_folder("config")));
  const auto errors = [&](const Words& more) {
    const CommandResult result = try_train(words + more);
    EXPECT_EQ(result.status, 2) << result.err;
    return result.err;
  };
  EXPECT_THAT(errors({"--optimizer.beta2", "0.9"}),
              AllOf(HasSubstr("--optimizer.beta2"), HasSubstr("'lion'"), HasSubstr("[optimizer.args]")));
  EXPECT_THAT(errors({"--optimizer.args.beta3", "0.9"}), HasSubstr("did you mean"));
  EXPECT_THAT(errors({"--optimizer.args.beta2", "1"}), HasSubstr("from 0 to below 1"));
  EXPECT_THAT(errors({"--optimizer.param_groups", "norm: eps=0"}),
              HasSubstr("known: lr beta1 beta2 weight_decay"));
  EXPECT_THAT(errors({"--optimizer.name", "loin"}),
              AllOf(HasSubstr("optimizer.name"), HasSubstr("known: Adam, AdamW, lion"),
                    HasSubstr("did you mean 'lion'?")));
}

}  // namespace
}  // namespace titan::testing
