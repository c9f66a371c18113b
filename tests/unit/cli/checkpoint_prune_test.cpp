// titan checkpoint prune and ls on difficult file systems and next to other runs.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>

#include "checkpoint_files.h"
#include "cli/checkpoint/commands.h"
#include "titan/checkpoint/step_folder.h"
#include "titan/core/error.h"
#include "unit/checkpoint/in_child.h"
#include "unit/checkpoint/temp_folder.h"

namespace {
int prune_flock_errno = 0;  // the errno with which flock fails; 0: it works
}

// Replaces the C library's flock, also for the library under test.
extern "C" __attribute__((visibility("default"))) int flock(int descriptor, int operation) noexcept {
  if (prune_flock_errno == 0) return static_cast<int>(syscall(SYS_flock, descriptor, operation));
  errno = prune_flock_errno;
  return -1;
}

namespace titan::cli {
namespace {

using ::testing::HasSubstr;
using titan::testing::save_checkpoint;
using titan::testing::TempFolder;

void save_steps(const std::filesystem::path& folder) {
  for (const int64_t step : {1, 2, 3})
    save_checkpoint(folder, {.step = step, .world_size = 1, .tensors = {{"w", at::arange(8.0), {}}}});
}

size_t num_steps_in(const std::filesystem::path& folder) { return checkpoint::list_steps(folder).size(); }

TEST(CheckpointPrune, NeedsForceWithoutLocks) {
  const TempFolder folder;
  save_steps(folder.path());
  const Arguments words = {folder.path().string(), "--keep", "2"};
  prune_flock_errno = EOPNOTSUPP;
  std::string problem;
  try {
    checkpoint_prune(words);
  } catch (const Error& error) {
    problem = error.what();
  }
  EXPECT_THAT(problem, HasSubstr("has no locks; if none does, add --force"));
  EXPECT_EQ(num_steps_in(folder.path()), 3u);
  Arguments forced = words;
  forced.push_back("--force");
  checkpoint_prune(forced);
  prune_flock_errno = 0;
  EXPECT_EQ(num_steps_in(folder.path()), 2u);
}

// A run that has a disk to itself has a folder lost+found.
TEST(CheckpointPrune, SkipsFoldersThatCannotBeRead) {
  const TempFolder folder;
  save_steps(folder / "checkpoint");
  std::filesystem::create_directory(folder / "lost+found");
  std::filesystem::permissions(folder.path(), std::filesystem::perms(0755));
  std::filesystem::permissions(folder / "lost+found", std::filesystem::perms::none);
  const auto result =
      titan::testing::as_nobody([&] { return std::to_string(checkpoint_ls({folder.path().string()})); });
  std::filesystem::permissions(folder / "lost+found", std::filesystem::perms(0755));
  EXPECT_EQ(result.status, 0) << result.message;
}

TEST(CheckpointPrune, LsShowsReplacedSteps) {
  const TempFolder folder;
  save_steps(folder.path());
  std::filesystem::create_directory(folder / "step-2.model");
  std::filesystem::create_directory(folder / ".step-9.ab.replaced");
  ::testing::internal::CaptureStdout();
  checkpoint_ls({folder.path().string()});
  const std::string text = ::testing::internal::GetCapturedStdout();
  EXPECT_THAT(text, HasSubstr("step-2.model: put aside"));
  EXPECT_THAT(text, HasSubstr(".step-9.ab.replaced: being replaced"));
}

}  // namespace
}  // namespace titan::cli
