#pragma once

// The ends of the ranks' newest logs, looked at again and again by somebody who watches a run.

#include <cstdint>
#include <filesystem>
#include <map>
#include <vector>

#include "cli/run/structured_events.h"

namespace titan::cli {

class RankTails {
 public:
  /// `tail_bytes` of each log, of at most `most_ranks`.
  RankTails(int64_t tail_bytes, size_t most_ranks) : tail_bytes_(tail_bytes), most_ranks_(most_ranks) {}

  /// As the files stand now: those that haven't grown since the last look aren't read again. Where a tail
  /// holds no figures (they come each log_freq steps, and steps leave many lines), the last ones from before
  /// it stand in front.
  std::vector<ProcessLog> read(const std::filesystem::path& run);

 private:
  struct Known {
    std::filesystem::path path;
    uintmax_t size = 0;
    ProcessLog log;
  };
  ProcessLog read_one(const ProcessFiles& files, const Known* before) const;

  int64_t tail_bytes_;
  size_t most_ranks_;
  std::map<int, Known> known_;
};

}  // namespace titan::cli
