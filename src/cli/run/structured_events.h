#pragma once

// Reads the structured logs of a run's ranks (observe/structured_log.h).

#include <cstdint>
#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace titan::cli {

struct LoggedEvent {
  enum class Kind { Start, End, Error, Instant };
  Kind kind = Kind::Instant;
  std::string name;             ///< of a span: without the suffix
  int64_t time_us = 0;          ///< since 1970
  std::optional<double> value;  ///< of an end: the span's duration in milliseconds
  int64_t step = 0;
  int64_t thread = 0;
  int64_t relative_step = 0;  ///< of its process, from 1; 0 before the first
};

/// What one process logged, in order of time.
struct ProcessLog {
  int rank = 0;
  int64_t pid = 0;
  std::string host;
  nlohmann::ordered_json environment;  ///< an object; empty if the log has none
  std::vector<LoggedEvent> events;

  int64_t first_us() const { return events.empty() ? 0 : events.front().time_us; }
  int64_t last_us() const { return events.empty() ? 0 : events.back().time_us; }
  /// The last event of this name, or null.
  const LoggedEvent* last(const std::string& name) const;
};

/// The log files of one process: the rotated one, then the current one.
struct ProcessFiles {
  int rank = 0;
  std::string stem;  ///< has the process's start time after the rank
  std::vector<std::filesystem::path> paths;
};

/// The folder of a run's structured logs; `folder` may be the run's or this one itself. Empty: there is none.
std::filesystem::path structured_folder(const std::filesystem::path& folder);

/// When the process of a log started, by its file's name; 0 if the name doesn't have it.
int64_t start_us(const ProcessFiles& files);

/// Sorted by rank, then by start time.
std::vector<ProcessFiles> list_structured_logs(const std::filesystem::path& folder);

struct ReadOptions {
  bool spans = true;        ///< false: instants and errors only, a small part of a log
  int64_t tail_bytes = -1;  ///< at most the last so many bytes; -1: everything
  int64_t first_step = 0;   ///< only events from here to last_step are kept
  int64_t last_step = INT64_MAX;
};

/// Skips lines that aren't events (a killed process may leave half a line).
ProcessLog read_structured_log(const ProcessFiles& files, const ReadOptions& options = {});

}  // namespace titan::cli
