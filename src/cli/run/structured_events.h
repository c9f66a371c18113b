#pragma once

// What the ranks of a run wrote into their structured logs (train/structured_log.h), read back.

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
  std::string name;             ///< of a span without its suffix
  int64_t time_us = 0;          ///< since 1970
  std::optional<double> value;  ///< of an end: how long the span took, in milliseconds
  int64_t step = 0;
  int64_t thread = 0;
  int64_t relative_step = 0;  ///< of its process, from 1; 0 before the first
};

/// What one process wrote, in its order.
struct ProcessLog {
  int rank = 0;
  int64_t pid = 0;
  std::string host;
  nlohmann::ordered_json environment;  ///< an object; empty where the log doesn't say
  std::vector<LoggedEvent> events;

  int64_t first_us() const { return events.empty() ? 0 : events.front().time_us; }
  int64_t last_us() const { return events.empty() ? 0 : events.back().time_us; }
  /// The last of this name.
  const LoggedEvent* last(const std::string& name) const;
};

/// The logs of one process: what was rotated away, then the current file.
struct ProcessFiles {
  int rank = 0;
  std::string stem;  ///< begins with the process's start time, behind the rank
  std::vector<std::filesystem::path> paths;
};

/// The folder of a run's structured logs: `folder` is the run's, or this one itself. Empty: there is none.
std::filesystem::path structured_folder(const std::filesystem::path& folder);

/// When the process of a log began, by its file's name; 0 where that doesn't say.
int64_t start_us(const ProcessFiles& files);

/// By rank, then by start.
std::vector<ProcessFiles> list_structured_logs(const std::filesystem::path& folder);

struct ReadOptions {
  bool spans = true;        ///< false: instants and errors only, which are a fraction
  int64_t tail_bytes = -1;  ///< the last so many at most; -1: everything
  int64_t first_step = 0;   ///< events of steps in between; others aren't kept
  int64_t last_step = INT64_MAX;
};

/// Lines that aren't an event (the last one of a killed process may be half) are passed over.
ProcessLog read_structured_log(const ProcessFiles& files, const ReadOptions& options = {});

}  // namespace titan::cli
