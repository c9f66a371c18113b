#pragma once

// Logging to standard error: one line per message and one write per line, so that the lines of several ranks
// never mix.
//
//   log::info(str("step ", step, ": loss ", loss));
//   [titan] 2026-02-20 12:00:00.123 - [rank 3] info - step 12: loss 3.5
//
// If standard error fails (closed, full disk), the message is lost and the run continues.

#include <string_view>

namespace titan::log {

enum class Level { Debug, Info, Warning, Error };

struct Settings {
  int rank = -1;  ///< shown as "[rank 3]" when >= 0 and world_size > 1
  int world_size = 1;
  Level level = Level::Info;  ///< messages below are dropped
  bool color = false;         ///< ANSI colors for the level
};

/// May be called again. Thread-safe.
void configure(const Settings& settings);
Settings settings();

void debug(std::string_view message);
void info(std::string_view message);
void warning(std::string_view message);
void error(std::string_view message);

/// On rank 0 only, for messages that are the same on every rank.
void info_rank0(std::string_view message);
void warning_rank0(std::string_view message);

}  // namespace titan::log
