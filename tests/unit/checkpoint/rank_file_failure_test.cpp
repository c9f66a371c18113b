// Writes that fail: the message names the reason, and no file is left.

#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <mutex>
#include <stdexcept>
#include <thread>

#include <gtest/gtest.h>

#include "checkpoint/format/rank_file.h"
#include "checkpoint/format/stored_files.h"
#include "core/durable.h"
#include "core/units.h"
#include "unit/checkpoint/rank_file_support.h"

namespace titan::checkpoint {
namespace {

using namespace testing;

// Writes a local file with these calls to the operating system.
WrittenFile write_with(const FileCalls& calls, const std::filesystem::path& path,
                       const FileIdentity& identity, std::span<const PieceToWrite> pieces,
                       const WriteOptions& options) {
  const auto create = [&](int64_t num_bytes) { return detail::local_writer(path, num_bytes, calls); };
  return detail::write_rank_file(create, identity, pieces, options);
}

using titan::testing::TempFolder;

#define EXPECT_SAYS(message, words) \
  EXPECT_NE((message).find(words), std::string::npos) << "'" << (message) << "'"

// Five chunks.
std::vector<PieceToWrite> pieces_to_fail() {
  return {piece("a", sample(at::kFloat, {3, kBlockBytes})), piece("b", sample(at::kFloat, {5, kBlockBytes})),
          piece("c", sample(at::kByte, {100}))};
}

struct Outcome {
  std::string message;  // empty: the write succeeded
  bool file_left = false;
};

class FailingWrite : public ::testing::Test {
 protected:
  Outcome write(const FileCalls& calls, int num_threads = 1,
                std::function<void(int64_t)> progress = {}) const {
    Outcome outcome;
    outcome.message = complaint([&] {
      write_with(calls, path_, kIdentity, pieces_, {.num_threads = num_threads, .progress = progress});
    });
    outcome.file_left = std::filesystem::exists(path_);
    return outcome;
  }
  void expect_written(const FileCalls& calls, int num_threads) const {
    const Outcome outcome = write(calls, num_threads);
    EXPECT_EQ(outcome.message, "");
    write_rank_file(folder_ / "expected", kIdentity, pieces_);
    EXPECT_TRUE(read_raw(path_) == read_raw(folder_ / "expected"));
  }

  TempFolder folder_;
  std::filesystem::path path_ = folder_ / "rank_00003.safetensors";
  const std::vector<PieceToWrite> pieces_ = pieces_to_fail();
};

int fails_with(int error) {
  errno = error;
  return -1;
}

TEST_F(FailingWrite, NamesTheFailedCallAndRemovesTheFile) {
  struct Case {
    const char* words;
    FileCalls calls;
  };
  const Case cases[] = {
      {"reserve", {.fallocate = [](int, int, off_t, off_t) { return fails_with(EIO); }}},
      {"write failed", {.pwritev = [](int, const iovec*, int, off_t) { return ssize_t{fails_with(EIO)}; }}},
      {"sync failed", {.fdatasync = [](int) { return fails_with(EIO); }}},
      {"close failed",
       {.close =
            [](int fd) {
              ::close(fd);
              return fails_with(EIO);
            }}},
  };
  for (const Case& one : cases) {
    for (int threads : {1, 3}) {
      const Outcome outcome = write(one.calls, threads);
      EXPECT_SAYS(outcome.message, path_.string());
      EXPECT_SAYS(outcome.message, one.words);
      EXPECT_SAYS(outcome.message, "EIO");
      EXPECT_FALSE(outcome.file_left) << one.words;
    }
  }
}

TEST_F(FailingWrite, ContinuesShortAndInterruptedWrites) {
  for (int threads : {1, 2}) {
    std::atomic<int> count{0};
    const auto pwritev = [&](int fd, const iovec* parts, int num_parts, off_t offset) -> ssize_t {
      const int call = count++;
      if (call % 3 == 0) return fails_with(EINTR);
      if (call % 3 == 1) return ::pwrite(fd, parts[0].iov_base, (parts[0].iov_len + 1) / 2, offset);
      return ::pwritev(fd, parts, num_parts, offset);
    };
    std::atomic<bool> synced{false};
    const auto fdatasync = [&](int fd) {
      return synced.exchange(true) ? ::fdatasync(fd) : fails_with(EINTR);
    };
    expect_written({.pwritev = pwritev, .fdatasync = fdatasync}, threads);
  }
}

TEST_F(FailingWrite, ReportsAWriteOfZeroBytes) {
  const Outcome outcome = write({.pwritev = [](int, const iovec*, int, off_t) { return ssize_t{0}; }});
  EXPECT_SAYS(outcome.message, "accepted no bytes");
  EXPECT_FALSE(outcome.file_left);
}

TEST_F(FailingWrite, WorksWhereSpaceCannotBeReserved) {
  expect_written({.fallocate = [](int, int, off_t, off_t) { return fails_with(EOPNOTSUPP); }}, 2);
}

// Fails after a short write, like a disk that fills up when space can't be reserved.
TEST_F(FailingWrite, ReportsADiskThatFillsUp) {
  std::atomic<int> count{0};
  const Outcome outcome = write({.pwritev = [&](int fd, const iovec* parts, int, off_t offset) -> ssize_t {
    return count++ == 0 ? ::pwrite(fd, parts[0].iov_base, 1000, offset) : fails_with(ENOSPC);
  }});
  EXPECT_SAYS(outcome.message, str("it needs ", size_text(rank_file_bytes(kIdentity, pieces_)), ", and "));
  EXPECT_SAYS(outcome.message, "B was free: No space left on device (ENOSPC)");
  EXPECT_FALSE(outcome.file_left);
}

TEST_F(FailingWrite, StopsIfProgressThrows) {
  for (int threads : {1, 2, 4}) {
    std::atomic<int> chunks{0};
    const auto progress = [&](int64_t) {
      if (++chunks == 2) throw std::domain_error("enough");
    };
    EXPECT_THROW(write({}, threads, progress), std::domain_error);
    EXPECT_LE(chunks, 1 + threads);
    EXPECT_FALSE(std::filesystem::exists(path_));
  }
}

TEST_F(FailingWrite, ReplacesAnOlderFileWithoutOverwritingIt) {
  write_raw(folder_ / "older", "older");
  std::filesystem::create_hard_link(folder_ / "older", path_);
  expect_written({}, 1);
  EXPECT_EQ(read_raw(folder_ / "older"), "older");

  std::filesystem::remove(path_);
  std::filesystem::create_symlink(folder_ / "older", path_);
  expect_written({}, 1);
  EXPECT_EQ(read_raw(folder_ / "older"), "older");
}

TEST_F(FailingWrite, ReportsTheFileSizeLimit) {
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit old_limit = {};
  ::getrlimit(RLIMIT_FSIZE, &old_limit);
  const rlimit limit = {1'000'000, old_limit.rlim_max};
  ::setrlimit(RLIMIT_FSIZE, &limit);
  const Outcome reserved = write({});
  const Outcome written =
      write({.fallocate = [](int, int, off_t, off_t) { return fails_with(EOPNOTSUPP); }}, 2);
  ::setrlimit(RLIMIT_FSIZE, &old_limit);
  std::signal(SIGXFSZ, old_handler);
  for (const Outcome& outcome : {reserved, written}) {
    EXPECT_SAYS(outcome.message, "EFBIG");
    EXPECT_SAYS(outcome.message, str("it needs ", size_text(rank_file_bytes(kIdentity, pieces_))));
    EXPECT_SAYS(outcome.message, "limited to 1 MB (ulimit -f)");
    EXPECT_FALSE(outcome.file_left);
  }
}

TEST_F(FailingWrite, ReportsAMissingFolder) {
  const std::string message = complaint([&] { write_rank_file(folder_ / "no/f", kIdentity, pieces_); });
  EXPECT_SAYS(message, "ENOENT");
  std::filesystem::create_directory(path_);
  EXPECT_SAYS(write({}).message, path_.string());
  EXPECT_TRUE(std::filesystem::is_directory(path_));
}

// A file system in memory, with a given size.
class SmallDisk {
 public:
  explicit SmallDisk(int64_t num_bytes) {
    mounted_ = ::mount("tmpfs", folder_.path().c_str(), "tmpfs", 0, str("size=", num_bytes).c_str()) == 0;
  }
  ~SmallDisk() {
    if (mounted_) ::umount2(folder_.path().c_str(), MNT_DETACH);
  }
  bool mounted() const { return mounted_; }
  bool make_read_only() const {
    return ::mount("tmpfs", folder_.path().c_str(), "tmpfs", MS_REMOUNT | MS_RDONLY, "") == 0;
  }
  std::filesystem::path operator/(const std::string& name) const { return folder_ / name; }

 private:
  TempFolder folder_;
  bool mounted_ = false;
};

TEST_F(FailingWrite, ReportsAFullDiskBeforeWriting) {
  const int64_t needed = rank_file_bytes(kIdentity, pieces_);
  for (int percent : {10, 50, 99}) {
    for (bool can_reserve : {true, false}) {
      const SmallDisk disk(needed * percent / 100);
      if (!disk.mounted()) GTEST_SKIP() << "no tmpfs can be mounted here";
      FileCalls calls;
      if (!can_reserve) calls.fallocate = [](int, int, off_t, off_t) { return fails_with(EOPNOTSUPP); };
      int chunks = 0;
      const std::string message = complaint([&] {
        write_with(calls, disk / "f", kIdentity, pieces_, {.progress = [&](int64_t) { ++chunks; }});
      });
      // The disk has whole pages.
      EXPECT_SAYS(message, str("it needs ", size_text(needed), ", and ",
                               size_text((needed * percent / 100 + 4095) / 4096 * 4096),
                               " was free: No space left on device (ENOSPC)"));
      EXPECT_EQ(chunks, 0) << "the full disk was found only after writing";
      EXPECT_FALSE(std::filesystem::exists(disk / "f"));
    }
  }
  const SmallDisk disk(needed + 100'000);
  EXPECT_EQ(complaint([&] { write_rank_file(disk / "f", kIdentity, pieces_); }), "");
}

// There is enough space at first, but another process takes it during the write.
TEST_F(FailingWrite, ReportsADiskThatAnotherProcessFills) {
  const int64_t needed = rank_file_bytes(kIdentity, pieces_);
  const SmallDisk disk(needed + 100'000);
  if (!disk.mounted()) GTEST_SKIP() << "no tmpfs can be mounted here";
  const auto fallocate = [&](int, int, off_t, off_t) { return fails_with(EOPNOTSUPP); };
  int chunks = 0;
  const auto progress = [&](int64_t) {
    if (++chunks == 1) write_raw(disk / "other", std::string(4 << 20, 'x'));
  };
  const std::string message = complaint(
      [&] { write_with({.fallocate = fallocate}, disk / "f", kIdentity, pieces_, {.progress = progress}); });
  EXPECT_SAYS(message, "ENOSPC");
  EXPECT_FALSE(std::filesystem::exists(disk / "f"));
}

TEST_F(FailingWrite, ReportsAReadOnlyFolder) {
  if (::geteuid() == 0) {  // a folder's mode doesn't stop root
    const SmallDisk disk(1 << 20);
    if (!disk.mounted() || !disk.make_read_only()) GTEST_SKIP() << "no tmpfs can be mounted here";
    EXPECT_SAYS(complaint([&] { write_rank_file(disk / "f", kIdentity, pieces_); }), "EROFS");
  } else {
    ::chmod(folder_.path().c_str(), 0555);
    EXPECT_SAYS(write({}).message, "EACCES");
    ::chmod(folder_.path().c_str(), 0755);
  }
}

}  // namespace
}  // namespace titan::checkpoint
