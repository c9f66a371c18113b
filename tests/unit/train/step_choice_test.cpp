// Which step a run goes on behind, and which it has come to.

#include "train/step_choice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <limits>

#include "checkpoint_files.h"
#include "titan/checkpoint/step_folder.h"
#include "unit/checkpoint/temp_folder.h"

namespace titan::train {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using titan::testing::TempFolder;

constexpr int64_t kAll = std::numeric_limits<int64_t>::max();

void save_state(const std::filesystem::path& folder, int64_t step, double value = 1) {
  titan::testing::save_checkpoint(folder,
                                  {.step = step, .tensors = {{"w", at::full({8}, value, at::kDouble), {}}}});
}

void save_model_alone(const std::filesystem::path& folder, int64_t step) {
  std::filesystem::create_directories(checkpoint::step_path(folder, step));
  std::ofstream(checkpoint::step_path(folder, step) / "model.safetensors") << "a model";
}

// Behind it a run would overflow at once, again and again.
TEST(StepChoice, PassesOverAStateThatOverflowed) {
  const TempFolder folder;
  const double infinity = std::numeric_limits<double>::infinity();
  save_state(folder.path(), 1);
  save_state(folder.path(), 2);
  for (const int64_t step : {3, 4}) save_state(folder.path(), step, infinity);
  StepChoice choice = choose_newest(folder.path(), kAll);
  EXPECT_EQ(choice.step, 2);
  EXPECT_THAT(choice.passed_over, ElementsAre(HasSubstr("step-4: not all of its numbers are finite"),
                                              HasSubstr("step-3: not all of its numbers are finite")));
  EXPECT_EQ(choose_step(folder.path(), 4).step, 4) << "asked for";
}

TEST(StepChoice, TakesItWhereThereIsNoOther) {
  const TempFolder folder;
  for (const int64_t step : {3, 4}) save_state(folder.path(), step, std::numeric_limits<double>::quiet_NaN());
  save_model_alone(folder.path(), 5);
  const StepChoice choice = choose_newest(folder.path(), kAll);
  EXPECT_EQ(choice.step, 4);
  EXPECT_THAT(choice.passed_over, ElementsAre(HasSubstr("step-5 holds a model alone")));
}

TEST(StepChoice, TheLastStepMayBeAModel) {
  const TempFolder folder;
  EXPECT_EQ(last_step_in(folder / "none"), std::nullopt);
  save_state(folder.path(), 5);
  EXPECT_EQ(last_step_in(folder.path()), 5);
  save_model_alone(folder.path(), 7);
  EXPECT_EQ(last_step_in(folder.path()), 7);
  save_state(folder.path(), 9);
  std::filesystem::remove(folder / "step-9/rank_00000.safetensors");
  EXPECT_EQ(last_step_in(folder.path()), std::nullopt) << "not whole";
}

}  // namespace
}  // namespace titan::train
