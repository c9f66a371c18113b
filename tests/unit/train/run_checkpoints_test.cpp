#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <fstream>
#include <limits>

#include <ATen/ops/ones.h>

#include "checkpoint_files.h"
#include "titan/checkpoint/safetensors.h"
#include "titan/checkpoint/step_folder.h"
#include "train/checkpoints/peer_saves.h"
#include "unit/checkpoint/temp_folder.h"

namespace titan::train {
namespace {

namespace fs = std::filesystem;

class RunMarks : public ::testing::Test {
 protected:
  RunMarks() { fs::create_directories(run_); }
  void copy_to(const fs::path& other) const { fs::copy(run_, other, fs::copy_options::recursive); }

  const titan::testing::TempFolder folder_;
  const fs::path run_ = folder_ / "run", other_ = folder_ / "other";
};

TEST_F(RunMarks, SurviveARestart) {
  const RunMark mark = run_mark(run_);
  EXPECT_EQ(mark.run.size(), 32u);
  EXPECT_THAT(mark.folder, ::testing::StartsWith(fs::canonical(run_).string()));
  const RunMark again = run_mark(run_);
  EXPECT_EQ(again.run, mark.run);
  EXPECT_EQ(again.folder, mark.folder);
  fs::create_directory_symlink(run_, other_);
  EXPECT_EQ(run_mark(other_).run, mark.run);
  EXPECT_EQ(run_mark(other_).folder, mark.folder);
}

// Even if the original is gone: each copy is a separate run.
TEST_F(RunMarks, CopiedFoldersGetANewMark) {
  const RunMark mark = run_mark(run_);
  copy_to(other_);
  copy_to(folder_ / "third");
  const RunMark copied = run_mark(other_);
  EXPECT_NE(copied.run, mark.run);
  EXPECT_NE(copied.folder, mark.folder);
  EXPECT_EQ(run_mark(other_).run, copied.run) << "the copy keeps its own mark";
  EXPECT_EQ(run_mark(run_).run, mark.run);
  fs::remove_all(run_);
  EXPECT_NE(run_mark(folder_ / "third").run, mark.run);
}

TEST_F(RunMarks, MoveWithTheFolder) {
  const RunMark mark = run_mark(run_);
  fs::rename(run_, other_);
  EXPECT_EQ(run_mark(other_).run, mark.run);
  EXPECT_NE(run_mark(other_).folder, mark.folder);
  // A copy at the old path is another run, because the mark records the new path.
  fs::copy(other_, run_, fs::copy_options::recursive);
  EXPECT_NE(run_mark(run_).run, mark.run);
  EXPECT_EQ(run_mark(other_).run, mark.run);
}

TEST_F(RunMarks, MissingOrPartialMarksAreReplaced) {
  const RunMark mark = run_mark(run_);
  fs::remove_all(run_);
  fs::create_directory(run_);
  EXPECT_NE(run_mark(run_).run, mark.run);
  std::ofstream(run_ / ".peer_run") << mark.run;
  EXPECT_NE(run_mark(run_).run, mark.run);
  EXPECT_THROW(run_mark(folder_ / "nowhere"), std::exception);
}

// ---- the step that a run resumes after, and the step that it has reached

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
  save_safetensors(checkpoint::step_path(folder, step) / "model.safetensors", {{"weight", at::ones({3})}});
}

// A run that resumed from it would overflow again at once.
TEST(StepChoice, SkipsAStateThatOverflowed) {
  const TempFolder folder;
  const double infinity = std::numeric_limits<double>::infinity();
  save_state(folder.path(), 1);
  save_state(folder.path(), 2);
  for (const int64_t step : {3, 4}) save_state(folder.path(), step, infinity);
  StepChoice choice = choose_newest(folder.path(), kAll);
  EXPECT_EQ(choice.step, 2);
  EXPECT_THAT(choice.skipped, ElementsAre(HasSubstr("step-4: not all of its numbers are finite"),
                                          HasSubstr("step-3: not all of its numbers are finite")));
  EXPECT_EQ(choose_step(folder.path(), 4).step, 4) << "an explicit request";
}

TEST(StepChoice, FallsBackToAnOverflowedStep) {
  const TempFolder folder;
  for (const int64_t step : {3, 4}) save_state(folder.path(), step, std::numeric_limits<double>::quiet_NaN());
  save_model_alone(folder.path(), 5);
  const StepChoice choice = choose_newest(folder.path(), kAll);
  EXPECT_EQ(choice.step, 4);
  EXPECT_THAT(choice.skipped, ElementsAre(HasSubstr("step-5 holds only a model")));
}

TEST(StepChoice, TheLastStepMayBeAModel) {
  const TempFolder folder;
  EXPECT_EQ(last_step_in(folder / "none"), std::nullopt);
  save_state(folder.path(), 5);
  EXPECT_EQ(last_step_in(folder.path()), 5);
  save_model_alone(folder.path(), 7);
  EXPECT_EQ(last_step_in(folder.path()), 7);
  std::filesystem::resize_file(folder / "step-7/model.safetensors", 90);
  EXPECT_EQ(last_step_in(folder.path()), std::nullopt) << "the model's file was cut";
  const StepChoice choice = choose_newest(folder.path(), kAll);
  EXPECT_EQ(choice.step, 5);
  EXPECT_TRUE(choice.is_damaged);
  save_state(folder.path(), 9);
  std::filesystem::remove(folder / "step-9/rank_00000.safetensors");
  EXPECT_EQ(last_step_in(folder.path()), std::nullopt) << "the newest step is incomplete";
}

}  // namespace
}  // namespace titan::train
