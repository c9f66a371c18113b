#pragma once

// The options that `titan launch` and `titan train --nproc` have in common about lost ranks.

#include <chrono>
#include <optional>
#include <set>

#include "titan/cli/launch.h"

namespace CLI {
class App;
}

namespace titan::cli {

struct RestartWords {
  int max_restarts = 0;
  int min_ranks = 0;
  std::optional<std::chrono::milliseconds> rejoin_after = RestartOptions().rejoin_after;
  std::optional<std::chrono::milliseconds> stop_grace = {};  ///< unset: it isn't said
  std::chrono::milliseconds longest_delay = RestartOptions().longest_delay;

  void apply(LaunchOptions& options) const;
  /// Throws ConfigError for --min-ranks without --max-restarts.
  void check_unused(const char* command) const;
};

/// --max-restarts, --min-ranks, --rejoin-after, --longest-delay and --grace, of whose default `default_grace`
/// tells. `words` has to live as long as `app`.
void add_restart_options(CLI::App& app, RestartWords& words, const char* default_grace);

/// --final-codes of `titan launch`. `codes` has to live as long as `app`.
void add_final_codes(CLI::App& app, std::optional<std::set<int>>& codes);

}  // namespace titan::cli
