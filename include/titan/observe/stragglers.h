#pragma once

// Which rank holds the others up. What a rank is slow at shows in its own time: that of data, forward,
// backward and optimizer, less what it was blocked in waits for peers. A slow rank's own time is long and its
// waits are short, with the others it is the other way round.
//
// Times are the host's. With NCCL a collective doesn't block the host, so that nothing can be told of what
// its device computes: there own times are those of the data alone, which the host does wait for.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "titan/config/table.h"
#include "titan/dist/world.h"
#include "titan/train/run_observer.h"

namespace titan::train {

class StructuredLog;

/// [metrics.stragglers]
struct StragglerSettings {
  bool enable = true;
  double sigma = 3;       ///< standard deviations above the median of the others
  double ratio = 1.2;     ///< and so many times that median
  int64_t intervals = 2;  ///< of metrics.log_freq, one after another
};

void describe(config::Table<StragglerSettings>& table);

/// Means a step, of one rank over one interval.
struct RankPace {
  double own_s = 0;
  double wait_s = 0;
  int stage = 0;      ///< its pipeline rank: what stages have to do differs
  double step_s = 0;  ///< all of a step
};

struct Straggler {
  int rank = 0;
  RankPace pace;
  double median_s = 0;   ///< own time of the other ranks of its stage
  double deviation = 0;  ///< in standard deviations of theirs
};

/// The slowest of all ranks, if it is far off the others of its stage, by more than
/// `least_share` of a step. Their
/// deviation is taken from the median absolute deviation, which no single rank can spoil, and is 2 % of the
/// median at least.
std::optional<Straggler> find_straggler(const std::vector<RankPace>& ranks, const StragglerSettings& settings,
                                        double least_share = 0.01);

/// Compares the ranks whenever a step is logged, by one all-gather of four numbers. Rank 0 warns when a rank
/// becomes the straggler, and tells when it isn't any more. The first interval pays for lazy set-up and
/// counts for nothing.
class StragglerWatch : public RunObserver {
 public:
  /// Collective over the world. `log` may be null; it gets each rank's own_s and wait_s.
  StragglerWatch(const dist::World& world, int stage, StragglerSettings settings, StructuredLog* log);

  void begin(Phase phase, int64_t step) override;
  void end(Phase phase, int64_t step, bool failed) override;
  void logged(const StepMetrics& metrics) override;

  /// As of the last interval; equal on all ranks.
  const std::vector<RankPace>& paces() const { return paces_; }
  const std::optional<Straggler>& straggler() const { return straggler_; }

 private:
  bool is_own(Phase phase) const;
  void end_step();
  void compare(int64_t step);
  void tell_change(int64_t step, const std::optional<Straggler>& found);
  std::string words(int64_t step) const;

  dist::World world_;
  int stage_;
  StragglerSettings settings_;
  StructuredLog* log_;
  std::vector<std::string> hosts_;  // by rank
  bool data_only_;                  // of own times
  int64_t steps_ = 0, own_ns_ = 0, wait_ns_ = 0, step_ns_ = 0;
  int64_t step_start_ns_ = 0, phase_start_ns_ = 0, phase_waited_ns_ = 0;
  std::optional<int64_t> fetched_waited_ns_;  // when the step's data came, until its forward begins
  bool warmed_up_ = false;
  std::vector<RankPace> paces_;
  int candidate_ = -1;
  int64_t intervals_ = 0;  // for which it has been
  int64_t absent_ = 0;     // intervals for which the straggler hasn't been the slowest
  std::optional<Straggler> straggler_;
};

}  // namespace titan::train
