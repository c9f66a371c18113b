#pragma once

// Logging to standard error, a line a message and a write a line, so that the lines of several ranks never
// mix:
//   [titan] 2026-02-20 12:00:00.123 - [rank 3] info - message
// Messages are built by the caller (`log::info(str(...))`), so that no formatting library leaks into headers.
// A failing standard error (closed, full disk) is ignored: logging never ends a run.

#include <string_view>

namespace titan::log {

enum class Level { Debug, Info, Warning, Error };

/// What main() knows once the rank is known; may be called again. Thread-safe.
struct Settings {
  int rank = -1;  ///< shown as "[rank 3]" when >= 0 and world_size > 1
  int world_size = 1;
  Level level = Level::Info;  ///< messages below are dropped
  bool color = false;         ///< ANSI colours for the level
};

void configure(const Settings& settings);
Settings settings();

void debug(std::string_view message);
void info(std::string_view message);
void warning(std::string_view message);
void error(std::string_view message);

/// As info and warning, on rank 0 only: for what would say the same on every rank.
void info_rank0(std::string_view message);
void warning_rank0(std::string_view message);

}  // namespace titan::log
