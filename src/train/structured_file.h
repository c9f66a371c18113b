#pragma once

// The file of a structured log, which doesn't grow beyond a limit.

#include <filesystem>
#include <memory>
#include <string>

#include "train/append_file.h"

namespace titan::train {

/// Half of the limit is in `<stem>.jsonl`; when that is full, it becomes `<stem>.earlier.jsonl` in place of
/// the last such file, and a new one begins with `head`.
class StructuredFile {
 public:
  StructuredFile(std::filesystem::path folder, std::string stem, int64_t max_bytes)
      : folder_(std::move(folder)), stem_(std::move(stem)), max_bytes_(max_bytes) {}

  bool is_open() const { return file_ != nullptr; }
  bool is_full() const { return is_open() && written_ >= max_bytes_ / 2; }
  /// The first file, or the next. Throws Error.
  void open(const std::string& head);
  /// After an error: the file is closed, and go_on() opens it again where it ends, which may be within a
  /// line.
  void close() { file_.reset(); }
  void go_on(const std::string& head);
  /// Throws Error.
  void append(const std::string& lines);

 private:
  std::filesystem::path path(const char* suffix) const { return folder_ / (stem_ + suffix); }

  std::filesystem::path folder_;
  std::string stem_;
  int64_t max_bytes_;
  int64_t written_ = 0;
  std::unique_ptr<AppendFile> file_;
};

/// Of a rank's processes the newest `kept` stay; files of older ones are removed, so that a job that fails
/// again and again doesn't fill its folder. What can't be removed stays.
void remove_old_logs(const std::filesystem::path& folder, int rank, size_t kept);

/// "train.global_rank_3.20261121-234000-123456-a1b2c3": of a process that starts now, in UTC with
/// microseconds, so that names sort as the processes began: on any host, across a change of the clocks, and
/// within a second.
std::string structured_stem(int rank);

}  // namespace titan::train
