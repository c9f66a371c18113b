#pragma once

// [Note: stragglers]
// In lockstep, every rank takes equally long for a step, however slow one of them is. A rank's own time shows
// the difference: the time of data, forward, backward and optimizer, minus the time for which it was blocked
// waiting for peers. A slow rank has a long own time and short waits; for the others it is the other way
// round.
//
// On CPUs, times are the host's. On a GPU the host runs ahead, so there forward, backward and optimizer are
// timed by the device ([Note: device time] in dist/stream_clock.h), and data counts as far as the device was
// idle for it. These times are known a step later.

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "dist/stream_clock.h"
#include "titan/config/table.h"
#include "titan/dist/world.h"
#include "titan/train/run_observer.h"

namespace titan::train {

class StructuredLog;

/// [metrics.stragglers]
struct StragglerSettings {
  bool enable = true;
  double sigma = 3;       ///< standard deviations above the median of the others
  double ratio = 1.2;     ///< and multiples of that median
  int64_t intervals = 2;  ///< consecutive intervals of metrics.log_freq
};

void describe(config::Table<StragglerSettings>& table);

/// One rank's means per step over one interval.
struct RankPace {
  double own_s = 0;
  double wait_s = 0;
  int stage = 0;      ///< pipeline rank: stages do different work
  double step_s = 0;  ///< the whole step
};

struct Straggler {
  int rank = 0;
  RankPace pace;
  double median_s = 0;   ///< own time of the other ranks of its stage
  double deviation = 0;  ///< in their standard deviations
};

/// Returns the rank that is slower than the other ranks of its stage by the most, if by more than the
/// settings' limits and `least_share` of a step. Ranks without an own time aren't compared. The standard deviation is estimated from the median absolute
/// deviation, which no single rank can spoil, and is at least 2 % of the median. A stage of two ranks shows no
/// deviation: it is taken to be 20 %.
std::optional<Straggler> find_straggler(const std::vector<RankPace>& ranks, const StragglerSettings& settings,
                                        double least_share = 0.01);

/// Allows one warning about a rank in ten minutes.
class WarningTimes {
 public:
  using Time = std::chrono::steady_clock::time_point;
  bool may_warn(int rank, Time now);

 private:
  std::map<int, Time> last_;  // by rank
};

/// Compares the ranks after each logged step, by three figures of each, which travel with the next exchange between hosts. Rank 0 logs when a rank
/// becomes the straggler, at most once in ten minutes for each rank, and when it has recovered. The first interval includes lazy set-up and is ignored.
class StragglerWatch : public RunObserver {
 public:
  /// Collective over the world. `log` may be null; it receives each rank's own_s and wait_s.
  StragglerWatch(const dist::World& world, int stage, StragglerSettings settings, StructuredLog* log);

  void begin(Phase phase, int64_t step) override;
  void end(Phase phase, int64_t step, bool failed) override;
  void logged(const StepMetrics& metrics) override;
  std::vector<double> figures() const override { return figures_; }
  void receive_figures(const std::vector<double>& of_ranks) override;

  /// Results of the last interval; equal on all ranks.
  const std::vector<RankPace>& paces() const { return paces_; }
  const std::optional<Straggler>& straggler() const { return straggler_; }

 private:
  bool is_own(Phase phase) const;
  void end_step();
  void read_device();
  void measure(int64_t step);
  void update_straggler(const std::optional<Straggler>& found);
  void warn();
  std::string warning_text() const;

  dist::World world_;
  StragglerSettings settings_;
  StructuredLog* log_;
  std::vector<std::string> hosts_;  // by rank
  std::vector<int> stages_;         // by rank
  // With a device: its clock, and for each of its unfinished steps the host's times of data and of the wait
  // for the others' data.
  struct DataTimes {
    int64_t own_ns = 0, wait_ns = 0;
  };
  std::optional<dist::StreamClock> device_;
  DataTimes data_now_;
  std::deque<DataTimes> data_times_;
  int64_t device_steps_ = 0;
  int64_t steps_ = 0, own_ns_ = 0, wait_ns_ = 0, step_ns_ = 0;
  int64_t step_start_ns_ = 0, phase_start_ns_ = 0, phase_waited_ns_ = 0;
  std::optional<int64_t> fetched_waited_ns_;  // set between a step's data and its forward
  bool warmed_up_ = false;
  int64_t measured_step_ = 0;    // the end of the last interval
  std::vector<double> figures_;  // its means, until the ranks have exchanged them
  std::vector<RankPace> paces_;
  int candidate_ = -1;
  int64_t intervals_ = 0;  // in a row with this candidate
  int64_t absent_ = 0;     // in a row in which the straggler wasn't the slowest
  std::optional<Straggler> straggler_;
  WarningTimes warning_times_;
  bool has_warned_ = false;  // about this straggler
};

}  // namespace titan::train
