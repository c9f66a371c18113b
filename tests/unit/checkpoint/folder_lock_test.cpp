#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>

#include "checkpoint/format/stored_files.h"
#include "core/file.h"
#include "temp_folder.h"
#include "titan/checkpoint/step_folder.h"
#include "titan/core/error.h"
#include "unit/checkpoint/in_child.h"

namespace {
int flock_errno = 0;  // the error of flock(); 0: it works
}

// Replaces the C library's function, for the library under test too.
extern "C" __attribute__((visibility("default"))) int flock(int descriptor, int operation) noexcept {
  if (flock_errno == 0) return static_cast<int>(syscall(SYS_flock, descriptor, operation));
  errno = flock_errno;
  return -1;
}

namespace titan::checkpoint {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using titan::testing::as_nobody;
using titan::testing::in_child;
using titan::testing::TempFolder;

std::string try_to_lock(const fs::path& folder) {
  try {
    return FolderLock(folder).held() ? "held" : "not held";
  } catch (const Error& error) {
    return error.what();
  }
}

std::string host() {
  char name[256] = {};
  gethostname(name, sizeof name - 1);
  return name;
}

TEST(FolderLock, AllowsOneWriterAtATime) {
  const TempFolder folder;
  const fs::path steps = folder / "made/by/the/lock";
  {
    const FolderLock lock(steps);
    EXPECT_TRUE(lock.held());
    const FolderLock copy = lock;
    const auto other = in_child([&] { return try_to_lock(steps); });
    EXPECT_THAT(
        other.message,
        AllOf(StartsWith(str(steps.string(), " is being written to by process ", getpid(), " on ", host())),
              HasSubstr("one writer at a time")));
    EXPECT_THAT(try_to_lock(steps), HasSubstr("is being written to"));  // in this process too
  }
  EXPECT_EQ(in_child([&] { return try_to_lock(steps); }).message, "held");
}

TEST(FolderLock, CanBeLookedForWithoutATrace) {
  const TempFolder folder;
  detail::check_unlocked(folder / "nowhere");
  EXPECT_FALSE(fs::exists(folder / "nowhere"));
  {
    const FolderLock lock(folder.path());
    const auto other = in_child([&]() -> std::string {
      try {
        detail::check_unlocked(folder.path());
        return "unlocked";
      } catch (const FolderInUse& error) {
        return error.what();
      }
    });
    EXPECT_THAT(other.message, HasSubstr(str("is being written to by process ", getpid(), " on ", host())));
  }
  in_child([&] {
    detail::check_unlocked(folder.path());
    return std::string();
  });
  EXPECT_EQ(read_file(folder / ".lock"), str("process ", getpid(), " on ", host(), "\n"));
  detail::check_unlocked(folder.path());
  EXPECT_EQ(try_to_lock(folder.path()), "held");
}

TEST(FolderLock, IsReleasedWhenTheProcessIsKilled) {
  const TempFolder folder;
  const auto killed = in_child([&]() -> std::string {
    const FolderLock lock(folder.path());
    return lock.held() ? (raise(SIGKILL), "alive") : "not held";
  });
  EXPECT_EQ(killed.status, 128 + SIGKILL);
  EXPECT_EQ(try_to_lock(folder.path()), "held");
  EXPECT_THAT(read_file(folder / ".lock"), str("process ", getpid(), " on ", host(), "\n"));
}

TEST(FolderLock, HidesUnprintableHolderText) {
  const TempFolder folder;
  const FolderLock lock(folder.path());
  for (const std::string text : {std::string(), std::string("\033[2Jboo"), std::string("\0\0", 2)}) {
    std::ofstream(folder / ".lock", std::ios::trunc) << text;
    EXPECT_THAT(in_child([&] { return try_to_lock(folder.path()); }).message,
                HasSubstr("is being written to by another process;"));
  }
}

TEST(FolderLock, WarnsWhereTheFileSystemHasNoLocks) {
  const TempFolder folder;
  for (int error : {ENOLCK, EOPNOTSUPP, ENOSYS, EINVAL}) {
    flock_errno = error;
    EXPECT_EQ(try_to_lock(folder.path()), "not held");
  }
  flock_errno = EIO;
  EXPECT_THAT(try_to_lock(folder.path()), HasSubstr("Input/output error (EIO)"));
  flock_errno = 0;
}

TEST(FolderLock, DoesNotFollowALink) {
  const TempFolder folder, elsewhere;
  fs::create_symlink(elsewhere / "victim", folder / ".lock");
  EXPECT_THAT(try_to_lock(folder.path()), HasSubstr("cannot open"));
  EXPECT_FALSE(fs::exists(elsewhere / "victim"));
}

TEST(FolderLock, NamesTheReasonItCannotWrite) {
  const TempFolder folder;
  fs::permissions(folder.path(), fs::perms(0555));
  EXPECT_EQ(as_nobody([&] { return try_to_lock(folder.path()); }).message,
            str("cannot lock: cannot open ", (folder / ".lock").string(), ": Permission denied (EACCES)"));
  EXPECT_THAT(as_nobody([&] { return try_to_lock(folder / "new"); }).message,
              HasSubstr(str("cannot make folder ", (folder / "new").string())));
  fs::permissions(folder.path(), fs::perms(0755));
  std::ofstream(folder / "file") << "in the way";
  EXPECT_THAT(try_to_lock(folder / "file"), HasSubstr("a file of that name is in the way"));
}

}  // namespace
}  // namespace titan::checkpoint
