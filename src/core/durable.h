#pragma once

// [Note: durable files]
// A durable file is complete or absent, even after a power failure:
//
//   OutputFile          known size, written in any order by several threads, synced by finish()
//   AtomicFile          an OutputFile under a temporary name, renamed, its folder synced
//   write_file_atomic   (core/file.h) the same, written from its beginning
//   write_gzip_atomic   the same, compressed
//   AppendFile          a log: each append reaches the operating system, sync() reaches the disk
//
// Folders are written under a temporary name, synced and renamed, and then their parent is synced, using the
// functions at the end of this file. Every Error names the path and the reason. Only flight dumps are written
// elsewhere (guard/flight_dump.cpp): a signal handler may call none of these functions.

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "titan/core/error.h"

namespace titan {

/// There is no room for a file of known size. what() names the file and both sizes.
class DiskFull : public Error {
 public:
  DiskFull(const std::string& message, int64_t needed, std::string why)
      : Error(message), needed_bytes(needed), reason(std::move(why)) {}

  const int64_t needed_bytes;
  const std::string reason;  ///< "No space left on device (ENOSPC)"
};

/// The bytes that this process can still write to a folder's file system; empty: it doesn't say.
std::optional<int64_t> free_bytes_of(const std::filesystem::path& folder);

/// Operating system calls. Tests replace them with failing ones.
struct FileCalls {
  std::function<int(int fd, int mode, off_t offset, off_t length)> fallocate = ::fallocate;
  std::function<ssize_t(int fd, const iovec* parts, int count, off_t offset)> pwritev = ::pwritev;
  std::function<int(int fd)> fdatasync = ::fdatasync;
  std::function<int(int fd)> close = ::close;
};

/// A file that is on disk once finish() returns. An unfinished file is removed.
///
/// Writes go through the page cache, and start_write_back() starts the disk at once. On a virtual disk, with
/// hashing, that is as fast as O_DIRECT from aligned buffers (1.0 to 1.3 GB/s against 0.7 to 1.2) and faster
/// than leaving everything to the sync (0.7 to 1.1). One or two threads, chunks of 1 or 8 MiB: no difference.
class OutputFile {
 public:
  /// Replaces an existing file of that name. If `num_bytes` is given, reserves that space, so that a full
  /// disk throws DiskFull before anything is written. Errors name `shown` (default: `path`).
  OutputFile(std::filesystem::path path, std::optional<int64_t> num_bytes, FileCalls calls = {},
             std::filesystem::path shown = {});
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  /// Writes all of `parts` (at most IOV_MAX; they are used up) in order, starting at `offset`. Thread-safe.
  void write(std::span<iovec> parts, int64_t offset);
  /// Asks the disk to start writing these bytes.
  void start_write_back(int64_t offset, int64_t num_bytes);
  /// Returns once the contents are on disk. The file's name is durable once its folder is synced.
  void finish();

 private:
  void reserve();
  [[noreturn]] void fail(const char* what, int error) const;
  [[noreturn]] void fail_for_space(int error) const;

  std::filesystem::path path_, shown_;
  std::optional<int64_t> num_bytes_, free_before_;
  FileCalls calls_;
  int fd_ = -1;
  std::atomic<int64_t> written_{0};
  bool finished_ = false;
};

/// An OutputFile under a temporary name in the same folder, until commit().
class AtomicFile {
 public:
  /// As OutputFile.
  AtomicFile(std::filesystem::path path, std::optional<int64_t> num_bytes);

  OutputFile& file() { return file_; }
  /// Syncs the file, gives it its name by a rename, and syncs the folder. On a failure the temporary is
  /// removed and an older file of that name stays.
  void commit();

 private:
  std::filesystem::path path_, temporary_;
  OutputFile file_;
};

/// A file that only grows. Every append reaches the operating system before it returns, so a log survives a
/// killed process.
class AppendFile {
 public:
  /// Makes the file and the folders above it; `truncate` drops the contents of an earlier run.
  AppendFile(std::filesystem::path path, bool truncate);
  ~AppendFile();
  AppendFile(const AppendFile&) = delete;
  AppendFile& operator=(const AppendFile&) = delete;

  void append(std::string_view bytes);
  void sync();
  const std::filesystem::path& path() const { return path_; }

 private:
  [[noreturn]] void fail(const char* operation) const;

  std::filesystem::path path_;
  int file_ = -1;
};

/// Removes the rows of later steps, and lines without a "step", from a file with one JSON object per line.
/// The file is replaced by one rename. A missing file stays missing. Returns the number of incomplete lines
/// and lines without a "step" among those removed.
int64_t keep_rows_up_to(int64_t step, const std::filesystem::path& path);

/// Writes the concatenated pieces as a gzip file, like write_file_atomic.
void write_gzip_atomic(const std::filesystem::path& path, std::span<const std::string_view> pieces);

namespace detail {

/// Makes the names in a folder durable.
void sync_folder(const std::filesystem::path& folder);
void rename_folder(const std::filesystem::path& from, const std::filesystem::path& to);
/// Swaps two names atomically. Returns false if the file system or the kernel can't.
bool exchange_folders(const std::filesystem::path& a, const std::filesystem::path& b);
/// Removes a folder with its contents, or a link but not its target. A missing folder is fine.
void remove_folder(const std::filesystem::path& folder);
/// Whether something has that name, even a broken link.
bool is_there(const std::filesystem::path& path);

}  // namespace detail
}  // namespace titan
