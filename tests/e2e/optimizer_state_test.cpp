// optimizer.state_dtype and optimizer.stochastic_rounding in whole runs.

#include "e2e/resume_run.h"

namespace titan::testing {
namespace {

const Words kInBf16 = {"--optimizer.state_dtype", "bfloat16"};
const Words kRounded = kInBf16 + Words{"--optimizer.stochastic_rounding"};

double farthest(const Curve& a, const Curve& b) {
  double most = 0;
  for (const auto& [step, numbers] : a) most = std::max(most, std::abs(numbers[0] - b.at(step)[0]));
  return most;
}

TEST(OptimizerState, LossIsNearThatOfFp32) {
  const Words words = resumable(fresh_folder("config")) + ranks(2);
  const auto plain = fresh_folder("plain"), rounded = fresh_folder("rounded"), again = fresh_folder("again"),
             seeded = fresh_folder("seeded");
  train(plain, words);
  train(rounded, words + kRounded);
  train(again, words + kRounded);
  train(seeded, words + kRounded + Words{"--debug.seed", "1"});
  EXPECT_LT(curve_of(rounded).at(20)[0], curve_of(rounded).at(1)[0] - 0.2);
  EXPECT_LT(farthest(curve_of(rounded), curve_of(plain)), 1e-3);
  EXPECT_NE(curve_of(rounded), curve_of(plain));
  EXPECT_EQ(curve_of(rounded), curve_of(again));
  EXPECT_NE(curve_of(rounded), curve_of(seeded));
}

TEST(OptimizerState, ResumesBitEqualAndOnOtherRanksNearly) {
  const Words words = resumable(fresh_folder("config")) + kRounded;
  const auto straight = fresh_folder("straight"), run = fresh_folder("run"), other = fresh_folder("other");
  train(straight, words + ranks(2));
  train(run, part_of_run(words + ranks(2), 10));
  train(run, words + ranks(2));
  EXPECT_EQ(curve_of(run), curve_of(straight));
  EXPECT_TRUE(bytes_of(step_folder(run, 20) / "model.safetensors") ==
              bytes_of(step_folder(straight, 20) / "model.safetensors"));
  int steps = 0;
  for (const Words& layout : {ranks(1), ranks(2, kTensor2), ranks(4, kReplicate2), ranks(2)})
    train(other, part_of_run(words + layout, steps += 5));
  EXPECT_LT(farthest(curve_of(other), curve_of(straight)), 1e-4);
}

TEST(OptimizerState, ChangesItsDtypeOnlyOnRequest) {
  const Words words = resumable(fresh_folder("config"));
  const auto run = fresh_folder("run");
  train(run, part_of_run(words, 5));
  EXPECT_THAT(train_log(run, part_of_run(words + kRounded, 10), 2),
              HasSubstr("is Float in the checkpoint, but here it is BFloat16"));
  const Words convert = {"--checkpoint.convert_dtypes"};
  train(run, part_of_run(words + kRounded + convert, 10));
  EXPECT_THAT(train_log(run, part_of_run(words, 15), 2),
              HasSubstr("is BFloat16 in the checkpoint, but here it is Float"));
  train(run, words + convert);
  const auto plain = fresh_folder("plain");
  train(plain, words);
  EXPECT_LT(farthest(curve_of(run), curve_of(plain)), 1e-3);
}

}  // namespace
}  // namespace titan::testing
