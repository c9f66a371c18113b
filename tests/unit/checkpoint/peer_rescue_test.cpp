// A launcher saves states from memory when no rank is left.

#include <unistd.h>

#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "checkpoint/peer/peer_folder.h"
#include "checkpoint_files.h"
#include "temp_folder.h"
#include "titan/checkpoint/step_folder.h"
#include "titan/core/error.h"

namespace titan::checkpoint {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

/// A job's folder in memory, and its run's folder on disk.
class PeerRescue : public ::testing::Test {
 protected:
  PeerRescue() {
    fs::create_directories(peers_);
    fs::create_directories(disk_);
    std::ofstream(peers_ / ".disk") << disk_.string();
  }

  static std::string folder_of(const std::string& job) {
    return str("titan-peers-", ::geteuid(), "-", digest_of(job).substr(0, 16), "-0123456789abcdef");
  }
  std::vector<LeftState> end(const std::function<bool()>& gives_up = {}) const {
    return end_peer_folders(memory_.path(), "job", gives_up);
  }
  /// Ends the job, expects one state that couldn't be saved, and returns the reason.
  std::string problem(const std::function<bool()>& gives_up = {}) const {
    const auto states = end(gives_up);
    EXPECT_THAT(states, SizeIs(1));
    EXPECT_TRUE(fs::is_directory(states.front().memory)) << "the state is gone";
    EXPECT_FALSE(fs::exists(disk_ / "step-7"));
    for (const auto& entry : fs::directory_iterator(disk_))
      EXPECT_FALSE(entry.is_directory()) << entry.path() << " is left over";
    return states.front().problem;
  }

  const titan::testing::TempFolder memory_, run_;
  const fs::path peers_ = memory_ / folder_of("job"), disk_ = run_ / "checkpoint";
};

TEST_F(PeerRescue, SavesAGenerationNewerThanTheDisk) {
  save_checkpoint(peers_, titan::testing::small_checkpoint(7));
  save_checkpoint(disk_, titan::testing::small_checkpoint(5));
  const auto states = end();
  ASSERT_THAT(states, SizeIs(1));
  EXPECT_EQ(states.front().problem, "");
  EXPECT_EQ(states.front().step, 7);
  EXPECT_EQ(states.front().disk, disk_ / "step-7");
  EXPECT_THAT(verify_step(disk_ / "step-7").damages, IsEmpty());
  EXPECT_FALSE(fs::exists(peers_));
  std::vector<std::string> problems;
  EXPECT_EQ(newest_complete(disk_, problems), 7);
}

TEST_F(PeerRescue, RemovesAGenerationThatTheDiskHas) {
  save_checkpoint(peers_, titan::testing::small_checkpoint(5));
  save_checkpoint(disk_, titan::testing::small_checkpoint(7));
  EXPECT_THAT(end(), IsEmpty());
  EXPECT_FALSE(fs::exists(peers_));
  EXPECT_FALSE(fs::exists(disk_ / "step-5"));
}

// A pending folder, or one that lacks a file, was never a generation.
TEST_F(PeerRescue, SavesTheNewestWholeGeneration) {
  save_checkpoint(peers_, titan::testing::small_checkpoint(7));
  const auto newer = save_checkpoint(peers_, titan::testing::small_checkpoint(8));
  fs::remove(newer / file_name(1));
  write_checkpoint_files(pending_path(peers_, 9, "run"), titan::testing::small_checkpoint(9));
  const auto states = end();
  ASSERT_THAT(states, SizeIs(1));
  EXPECT_EQ(states.front().step, 7);
  EXPECT_THAT(verify_step(disk_ / "step-7").damages, IsEmpty());
}

TEST_F(PeerRescue, LeavesOtherJobsFoldersAlone) {
  const fs::path other = memory_ / folder_of("another job");
  fs::create_directories(other);
  save_checkpoint(other, titan::testing::small_checkpoint(7));
  EXPECT_THAT(end(), IsEmpty());
  EXPECT_TRUE(fs::exists(other / "step-7"));
}

TEST_F(PeerRescue, KeepsAStateThatItCannotSave) {
  const fs::path step = save_checkpoint(peers_, titan::testing::small_checkpoint(7));
  EXPECT_THAT(problem([] { return true; }), HasSubstr("the copy was stopped before it was complete"));
  {
    const FolderLock another_run(disk_);
    EXPECT_THAT(problem(), HasSubstr(disk_.string()));
  }
  std::ofstream(peers_ / ".disk") << (run_ / "away").string();
  EXPECT_THAT(problem(), AllOf(HasSubstr("away"), HasSubstr("doesn't exist")));
  std::ofstream(peers_ / ".disk") << disk_.string();
  std::fstream file(step / file_name(2), std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(-1, std::ios::end);
  file.put('\x55');
  file.close();
  EXPECT_THAT(problem(), AllOf(HasSubstr(file_name(2)), HasSubstr("checksum")));
}

}  // namespace
}  // namespace titan::checkpoint
