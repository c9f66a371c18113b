#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>

namespace titan::checkpoint::detail {

/// A regular file that is read by pread. Every Error names its path. May be used from several threads.
class InputFile {
 public:
  explicit InputFile(const std::filesystem::path& path);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  const std::filesystem::path& path() const { return path_; }
  /// When it was opened.
  int64_t num_bytes() const { return num_bytes_; }
  int64_t bytes_read() const { return bytes_read_; }

  /// Throws Error where the file ends before.
  void read(std::span<std::byte> into, int64_t offset) const;
  /// Throws Error when the file's size isn't what it was when it was opened.
  void check_size() const;
  /// A hint: these bytes won't be read again; with 0 bytes, all behind the offset. (There is none for bytes
  /// that will be: asked ahead, the kernel takes them in by small pages and requests, where a large read gets
  /// large ones. Loads took 1.25 times as long.)
  void drop(int64_t offset, int64_t num_bytes) const;

 private:
  std::filesystem::path path_;
  int fd_ = -1;
  int64_t num_bytes_ = 0;
  mutable std::atomic<int64_t> bytes_read_{0};
};

}  // namespace titan::checkpoint::detail
