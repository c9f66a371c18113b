#include "train/run_mark.h"

#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

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

TEST_F(RunMarks, StayTheRuns) {
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

// Also where the first one is gone: of two copies each is a run.
TEST_F(RunMarks, OfACopyAreItsOwn) {
  const RunMark mark = run_mark(run_);
  copy_to(other_);
  copy_to(folder_ / "third");
  const RunMark copied = run_mark(other_);
  EXPECT_NE(copied.run, mark.run);
  EXPECT_NE(copied.folder, mark.folder);
  EXPECT_EQ(run_mark(other_).run, copied.run) << "it is a run from then on";
  EXPECT_EQ(run_mark(run_).run, mark.run);
  fs::remove_all(run_);
  EXPECT_NE(run_mark(folder_ / "third").run, mark.run);
}

TEST_F(RunMarks, MoveWithTheFolder) {
  const RunMark mark = run_mark(run_);
  fs::rename(run_, other_);
  EXPECT_EQ(run_mark(other_).run, mark.run);
  EXPECT_NE(run_mark(other_).folder, mark.folder);
  // A copy in its old place is another one, as the mark knows where it has gone.
  fs::copy(other_, run_, fs::copy_options::recursive);
  EXPECT_NE(run_mark(run_).run, mark.run);
  EXPECT_EQ(run_mark(other_).run, mark.run);
}

TEST_F(RunMarks, OfAFolderMadeAnewOrWithoutAWholeMarkAreNew) {
  const RunMark mark = run_mark(run_);
  fs::remove_all(run_);
  fs::create_directory(run_);
  EXPECT_NE(run_mark(run_).run, mark.run);
  std::ofstream(run_ / ".peer_run") << mark.run;
  EXPECT_NE(run_mark(run_).run, mark.run);
  EXPECT_THROW(run_mark(folder_ / "nowhere"), std::exception);
}

}  // namespace
}  // namespace titan::train
