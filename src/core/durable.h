#pragma once

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <string_view>

#include "titan/core/error.h"

namespace titan::detail {

/// "No space left on device (ENOSPC)"
inline std::string errno_text(int error) {
  const char* name = strerrorname_np(error);
  return str(std::strerror(error), " (", name != nullptr ? name : "unknown errno", ")");
}

}  // namespace titan::detail

namespace titan::checkpoint::detail {

// A file of known size that is on disk when it is finished, and else not there.
//
// Writes go through the page cache, and the disk is told to begin with each at once: measured on a virtual
// disk, with hashing, that is as fast as O_DIRECT from aligned buffers (1.0 to 1.3 GB/s beside 0.7 to 1.2)
// and faster than leaving all to the sync (0.7 to 1.1), and needs no alignment. One thread or two, chunks of
// 1 or 8 MiB made no difference beyond the noise.

/// What is asked of the operating system; tests put failures in their place.
struct FileCalls {
  std::function<int(int fd, int mode, off_t offset, off_t length)> fallocate = ::fallocate;
  std::function<ssize_t(int fd, const iovec* parts, int count, off_t offset)> pwritev = ::pwritev;
  std::function<int(int fd)> fdatasync = ::fdatasync;
  std::function<int(int fd)> close = ::close;
};

/// Every Error names the path and the reason.
class OutputFile {
 public:
  /// Removes what has that name, makes the file and reserves its space, so that a full disk is found before
  /// anything is written: the Error says how many bytes are needed and how many are free.
  OutputFile(const std::filesystem::path& path, int64_t num_bytes, FileCalls calls = {});
  /// Removes the file unless it is finished.
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  /// Writes all of `parts` (at most IOV_MAX; they are used up), one behind the other, from `offset` on. May
  /// be called by several threads.
  void write(std::span<iovec> parts, int64_t offset);
  /// Has the disk begin with these bytes; a hint.
  void start_write_back(int64_t offset, int64_t num_bytes);
  /// Returns when all is on disk, but for the file's name, which is its folder's.
  void finish();

 private:
  void reserve();
  void check_free_space();
  [[noreturn]] void fail(const char* what, int error);
  [[noreturn]] void fail_for_space(int error);

  std::filesystem::path path_;
  int64_t num_bytes_;
  FileCalls calls_;
  int fd_ = -1;
  bool finished_ = false;
};

}  // namespace titan::checkpoint::detail

namespace titan::detail {

// What the operating system does with folders, as Errors that name the path and the reason.

/// Makes the names in it durable.
void sync_folder(const std::filesystem::path& folder);
void rename_folder(const std::filesystem::path& from, const std::filesystem::path& to);
/// Swaps two names at one instant. False where the file system or the kernel can't.
bool exchange_folders(const std::filesystem::path& a, const std::filesystem::path& b);
/// With all that is in it; a link itself, not what it leads to. What isn't there is removed already.
void remove_folder(const std::filesystem::path& folder);
/// Something of that name, be it a broken link.
bool is_there(const std::filesystem::path& path);
/// Itself a folder, not a link to one.
bool is_own_folder(const std::filesystem::path& path);
/// Itself a regular file, not a link to one.
bool is_own_file(const std::filesystem::path& path);

}  // namespace titan::detail

namespace titan::train {

/// A file that only grows. Every append reaches the operating system before it returns, so that a log
/// survives a killed process. Throws Error that names the file and the reason (read-only folder, full disk).
class AppendFile {
 public:
  /// Makes the file and the folders above it; `truncate` drops what an earlier run left there.
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

/// Takes the rows of later steps, and what isn't a row with a "step", out of a file with a JSON object a
/// line. The file is replaced by one rename. One that isn't there stays so.
void keep_rows_up_to(int64_t step, const std::filesystem::path& path);

/// The pieces, one behind the other, as a gzip file; whole or not there (core/file.h). Throws Error.
void write_gzip_atomic(const std::filesystem::path& path, std::span<const std::string_view> pieces);

}  // namespace titan::train
