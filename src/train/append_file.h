#pragma once

#include <cstdint>
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

/// Takes the rows of later steps, and what isn't a row with a "step", out of a file with a JSON object a
/// line. The file is replaced by one rename. One that isn't there stays so.
void keep_rows_up_to(int64_t step, const std::filesystem::path& path);

}  // namespace titan::train
