#pragma once

// A file of known size that is on disk when it is finished, and else not there.
//
// Writes go through the page cache, and the disk is told to begin with each at once: measured on a virtual
// disk, with hashing, that is as fast as O_DIRECT from aligned buffers (1.0 to 1.3 GB/s beside 0.7 to 1.2)
// and faster than leaving all to the sync (0.7 to 1.1), and needs no alignment. One thread or two, chunks of
// 1 or 8 MiB made no difference beyond the noise.

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>

namespace titan::checkpoint::detail {

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
