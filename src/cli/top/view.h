#pragma once

// What `titan top` shows: a run as its files stand now.

#include <cstdint>
#include <filesystem>
#include <string>

#include "cli/run/rank_tails.h"

namespace titan::cli::top {

struct View {
  std::string text;    ///< lines
  bool ended = false;  ///< the run completed, was stopped or failed: nothing will change
};

struct ViewOptions {
  bool color = false;
  size_t most_ranks = 16;  ///< shown; the slowest one always is
};

/// Reads the ends of files only, so that it takes as long on a long run.
class Viewer {
 public:
  explicit Viewer(std::filesystem::path run);

  /// Throws ConfigError where there is no run.
  View look(int64_t now_us, const ViewOptions& options);

 private:
  std::filesystem::path run_;
  RankTails tails_;
};

}  // namespace titan::cli::top
