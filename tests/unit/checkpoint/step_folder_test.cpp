#include "titan/checkpoint/step_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "checkpoint_files.h"
#include "temp_folder.h"
#include "titan/core/error.h"
#include "unit/checkpoint/in_child.h"

namespace titan::checkpoint {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using titan::testing::as_nobody;
using titan::testing::CheckpointToSave;
using titan::testing::save_checkpoint;
using titan::testing::TempFolder;

CheckpointToSave tiny(int64_t step) {
  return {.step = step,
          .world_size = 2,
          .tensors = {{"w", at::arange(8.0), {{titan::testing::cut("dp", 2, 1, 0)}}}}};
}

std::vector<int64_t> step_numbers(const std::vector<StepEntry>& steps) {
  std::vector<int64_t> numbers;
  for (const StepEntry& step : steps) numbers.push_back(step.step);
  return numbers;
}

void write_text(const fs::path& path, const std::string& text) { std::ofstream(path) << text; }

TEST(StepFolder, NamesFolders) {
  EXPECT_EQ(step_path("a", 500), "a/step-500");
  EXPECT_EQ(pending_path("a", 510, "ab12"), "a/.step-510.ab12.tmp");
}

TEST(StepFolder, ListsStepsByNumber) {
  const TempFolder folder;
  for (int64_t step : {100, 9, 20}) save_checkpoint(folder.path(), tiny(step));
  fs::create_directory(folder / "step-30");
  const auto steps = list_steps(folder.path());
  EXPECT_THAT(step_numbers(steps), ElementsAre(9, 20, 30, 100));
  EXPECT_EQ(steps[0].path, folder / "step-9");
  EXPECT_TRUE(steps[0].has_manifest);
  EXPECT_FALSE(steps[2].has_manifest);
}

TEST(StepFolder, IgnoresOtherNames) {
  const TempFolder folder;
  for (const char* name :
       {"step-007", "step--1", "step-+1", "step-99999999999999999999", "step-9223372036854775808", "step-",
        "step", "step-1x", "step-1 ", "step-1.old", "xstep-1", "STEP-1", "step-1e3", "step-\xff",
        ".step-1.ab.tmp", "step-\n1", "step-0x10"})
    fs::create_directory(folder / name);
  write_text(folder / "step-5", "a file");
  for (const char* name : {"step-0", "step-9223372036854775807"}) fs::create_directory(folder / name);
  EXPECT_THAT(step_numbers(list_steps(folder.path())), ElementsAre(0, 9223372036854775807));
}

TEST(StepFolder, IgnoresLinks) {
  const TempFolder folder, elsewhere;
  save_checkpoint(elsewhere.path(), tiny(3));
  fs::create_directory_symlink(elsewhere / "step-3", folder / "step-3");
  fs::create_directory_symlink(folder / "nowhere", folder / "step-4");
  fs::create_directory(folder / "step-6");
  fs::create_symlink(elsewhere / "step-3/manifest.json", folder / "step-6/manifest.json");
  const auto steps = list_steps(folder.path());
  ASSERT_THAT(step_numbers(steps), ElementsAre(6));
  EXPECT_FALSE(steps[0].has_manifest);
  EXPECT_THAT(quick_problems(folder / "step-6"),
              ElementsAre(HasSubstr("manifest.json isn't a regular file")));
}

TEST(StepFolder, FindsNoStepsInAMissingFolder) {
  const TempFolder folder;
  EXPECT_THAT(list_steps(folder / "none"), ElementsAre());
  EXPECT_THAT(list_leftovers(folder / "none"), ElementsAre());
  std::vector<std::string> problems;
  EXPECT_EQ(newest_complete(folder / "none", problems), std::nullopt);
  EXPECT_THAT(problems, ElementsAre());
}

TEST(StepFolder, RefusesAnUnreadableFolder) {
  const TempFolder folder;
  fs::permissions(folder.path(), fs::perms(0755));
  fs::create_directory(folder / "steps");
  fs::permissions(folder / "steps", fs::perms::none);
  const auto result = as_nobody([&] { return str(list_steps(folder / "steps").size()); });
  fs::permissions(folder / "steps", fs::perms(0755));
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.message,
              HasSubstr(str("cannot list ", (folder / "steps").string(), ": Permission denied (EACCES)")));
  write_text(folder / "file", "");
  EXPECT_THROW(list_steps(folder / "file"), Error);
}

TEST(StepFolder, ListsLeftovers) {
  const TempFolder folder;
  for (const char* name : {".step-2.ab.tmp", ".step-10.run.1.old", ".step-3.tmp", ".step-3..tmp",
                           ".step-03.a.tmp", ".step-4.c.replaced", ".step-3.replaced", ".step-3.a.new",
                           ".snapshot", ".nfs0001", "..tmp", ".tmp", ".old", "step-3.a.tmp"})
    fs::create_directory(folder / name);
  const auto leftovers = list_leftovers(folder.path());
  ASSERT_EQ(leftovers.size(), 3u);
  EXPECT_EQ(leftovers[0].step, 10);
  EXPECT_EQ(leftovers[0].run_id, "run.1");
  EXPECT_EQ(leftovers[0].kind, LeftoverKind::Removed);
  EXPECT_EQ(leftovers[1].path, folder / ".step-2.ab.tmp");
  EXPECT_EQ(leftovers[1].kind, LeftoverKind::Pending);
  EXPECT_EQ(leftovers[2].step, 4);
  EXPECT_EQ(leftovers[2].kind, LeftoverKind::Replaced);
  EXPECT_TRUE(lacks_successor(leftovers[2], folder.path()));
  fs::create_directory(folder / "step-4");
  EXPECT_FALSE(lacks_successor(leftovers[2], folder.path()));
}

TEST(StepFolder, ListsFoldersPutAside) {
  const TempFolder folder;
  for (const char* name : {"step-2.model", "step-2.model.2", "step-10.state", "step-2.old", "step-02.model",
                           "step-2.modelling", "xstep-2.model", "step-2"})
    fs::create_directory(folder / name);
  EXPECT_THAT(list_put_aside(folder.path()),
              ElementsAre(folder / "step-10.state", folder / "step-2.model", folder / "step-2.model.2"));
}

TEST(StepFolder, FindsProblemsWithoutReadingTensors) {
  const TempFolder folder;
  const fs::path step = save_checkpoint(folder.path(), tiny(20));
  EXPECT_THAT(quick_problems(step), ElementsAre());
  EXPECT_THAT(quick_problems(step / ""), ElementsAre());
  fs::rename(step / "rank_00001.safetensors", folder / "kept");
  EXPECT_THAT(quick_problems(step), ElementsAre(HasSubstr("rank_00001.safetensors is missing")));
  fs::create_symlink(folder / "kept", step / "rank_00001.safetensors");
  EXPECT_THAT(quick_problems(step), ElementsAre(HasSubstr("rank_00001.safetensors isn't a regular file")));
  fs::remove(step / "rank_00001.safetensors");
  fs::rename(folder / "kept", step / "rank_00001.safetensors");
  const auto size = fs::file_size(step / "rank_00000.safetensors");
  fs::resize_file(step / "rank_00000.safetensors", size - 1);
  EXPECT_THAT(quick_problems(step), ElementsAre(HasSubstr(str("rank_00000.safetensors has ", size - 1,
                                                              " bytes; the manifest says ", size))));
  write_text(step / "manifest.json", "{}");
  EXPECT_THAT(quick_problems(step), ElementsAre(HasSubstr("manifest.json")));
  fs::remove(step / "manifest.json");
  EXPECT_THAT(quick_problems(step), ElementsAre(HasSubstr("manifest.json is missing")));
}

TEST(StepFolder, ReportsAStepUnderAnotherStepsName) {
  const TempFolder folder;
  const fs::path step = save_checkpoint(folder.path(), tiny(20));
  fs::rename(step, folder / "step-30");
  EXPECT_THAT(quick_problems(folder / "step-30"),
              ElementsAre(HasSubstr("belongs to step 20, but its folder is named for step 30")));
  fs::rename(folder / "step-30", folder / "best");
  EXPECT_THAT(quick_problems(folder / "best"), ElementsAre());
}

TEST(StepFolder, FindsTheNewestCompleteStep) {
  const TempFolder folder;
  for (int64_t step : {5, 10, 15, 20}) save_checkpoint(folder.path(), tiny(step));
  fs::create_directory(folder / "step-25");
  write_text(folder / "step-20/manifest.json", "not one");
  fs::remove(folder / "step-15/rank_00000.safetensors");
  std::vector<std::string> problems = {"an older line"};
  EXPECT_EQ(newest_complete(folder.path(), problems), 10);
  EXPECT_THAT(problems, ElementsAre("an older line", HasSubstr("step-25/manifest.json is missing"),
                                    HasSubstr("step-20/manifest.json"),
                                    HasSubstr("step-15/rank_00000.safetensors is missing")));
}

}  // namespace
}  // namespace titan::checkpoint
