#pragma once

#include <filesystem>
#include <string_view>

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

}  // namespace titan::train
