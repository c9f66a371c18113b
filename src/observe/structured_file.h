#pragma once

// The lines of a structured log, and the file that they go to.

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <limits>
#include <memory>
#include <string>

#include <c10/core/Device.h>

#include "core/durable.h"

namespace titan::dist {
class World;
}

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
  uint8_t step_tags = 0;  ///< kSavesTag | kValidatesTag
  EventKind kind = EventKind::Instant;
};

inline constexpr uint8_t kSavesTag = 1;
inline constexpr uint8_t kValidatesTag = 2;

int64_t steady_now_ns();

/// Writes events as JSON lines that name this process, its rank and its host.
class EventLines {
 public:
  EventLines(int rank, int local_rank);

  /// Measures the offset of the wall clock from the steady clock again: clocks drift, and people set them.
  void set_clock();

  /// The first line of each file. `environment`: a JSON object.
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

/// A JSON object for process_line(): versions, machine, device, place in the job, command line, threads.
std::string process_environment_json(const dist::World& world, at::Device device);

/// Bounded by `max_bytes`: `<stem>.jsonl` takes half of them. When that is full it becomes
/// `<stem>.earlier.jsonl`, replacing the previous such file, and a new one starts with `head`.
class StructuredFile {
 public:
  StructuredFile(std::filesystem::path folder, std::string stem, int64_t max_bytes)
      : folder_(std::move(folder)), stem_(std::move(stem)), max_bytes_(max_bytes) {}

  bool is_open() const { return file_ != nullptr; }
  bool is_full() const { return is_open() && written_ >= max_bytes_ / 2; }
  /// Opens the first file, or the next one. Throws Error.
  void open(const std::string& head);
  /// After an error: close, then reopen() to append. The file may end within a line.
  void close() { file_.reset(); }
  void reopen(const std::string& head);
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

/// Keeps the logs of the newest `kept` processes of a rank, so that a job that fails again and again doesn't
/// fill its folder. Files that can't be removed stay.
void remove_old_logs(const std::filesystem::path& folder, int rank, size_t kept);

/// "train.global_rank_3.20261121-234000-123456-a1b2c3", for a process that starts now. UTC with microseconds,
/// so that names sort by start time: on any host, across clock changes, and within a second.
std::string structured_stem(int rank);

}  // namespace titan::train
