#pragma once

// An event of the structured log, and its line.

#include <sys/types.h>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <memory>
#include <string>
#include <string_view>

#include "core/durable.h"

namespace titan::train {

enum class EventKind : uint8_t { Start, End, Error, Instant };

struct StructuredEvent {
  const char* name = "";
  const char* caller = "";
  int64_t steady_ns = 0;
  int64_t step = 0;
  int64_t relative_step = 0;                                ///< of this process, from 1; 0 before its first
  double value = std::numeric_limits<double>::quiet_NaN();  ///< NaN: none; of an end: milliseconds
  pid_t thread = 0;
  uint8_t step_tags = 0;  ///< bits of kSavesTag, kValidatesTag
  EventKind kind = EventKind::Instant;
};

inline constexpr uint8_t kSavesTag = 1;
inline constexpr uint8_t kValidatesTag = 2;

/// Writes events as lines that a process's number, rank and host are part of.
class EventLines {
 public:
  EventLines(int rank, int local_rank);

  /// Wall clock = steady clock + offset, as of now: clocks drift and are set.
  void set_clock();

  /// `environment`: a JSON object. For the top of each file.
  std::string process_line(const std::string& environment);
  void append(std::string& text, const StructuredEvent& event);

 private:
  void append_head(std::string& text, int64_t steady_ns, const char* type);

  int64_t process_start_ns_;
  int64_t offset_ns_ = 0;
  int64_t previous_ns_;
  int64_t sequence_ = 0;
  std::string identity_;  // `, "rank": 0, ...`
};

int64_t steady_now_ns();

// The file of a structured log, which doesn't grow beyond a limit.

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
