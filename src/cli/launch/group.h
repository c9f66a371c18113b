#pragma once

// A group of ranks, from the start of the first process to the end of the last one; and the places where groups may
// run.

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "cli/launch/process.h"

namespace titan::cli {

struct GroupOptions {
  const std::vector<std::string>& command;
  const ShownRanks& shown;
  std::chrono::milliseconds grace;
  std::chrono::milliseconds stop_grace;
  int num_places;       ///< places that share the host's cores
  Variables variables;  ///< for every rank, besides those that identify it
  /// When the group should stop because a larger one could start. Called again after each SIGUSR2, after
  /// `on_rejoin`.
  std::function<std::optional<std::chrono::steady_clock::time_point>()> next_growth;
  std::function<void()> on_rejoin;
};

struct LostRank {
  int rank = 0;
  std::string how;
};

/// How a group ended.
struct GroupEnd {
  enum class Kind {
    Done,       ///< all ranks returned 0
    Failed,     ///< see `report`
    Told,       ///< asked to end by the signal `told_to_end`, and not all ranks returned 0
    Outgrown,   ///< stopped because a larger group can start; see `ended_badly`
    CantStart,  ///< see `start_error`
  };
  Kind kind = Kind::Done;
  int told_to_end = 0;  ///< the signal; 0: none
  std::chrono::steady_clock::time_point told_at = {};
  bool told_twice = false;  ///< asked to end at once
  std::string start_error = {};
  /// After a request to end: the ranks that didn't return 0, and how they ended; empty: all returned 0.
  std::string ended_badly = {};
  std::chrono::duration<double> run_time = {};

  bool has_failed = false;  ///< a rank failed, asked to end or not; then:
  int exit_code = 0;        ///< of the rank that failed first; 128 + signal if a signal ended it
  /// Ranks that failed by themselves, not because others did: those that a signal ended, hung ones, or else the
  /// first one.
  std::vector<LostRank> lost = {};
  std::string report = {};  ///< a box with the rank that failed first and its last lines
};

/// Starts the ranks and waits for the end of the last one.
GroupEnd run_group(int num_ranks, GroupOptions options, SignalReader& signals);

/// A job of N ranks has N places on its host, each with its own GPU if there are enough. A lost rank's place stays
/// empty for a while, in case the place caused the loss.
class RankPlaces {
 public:
  using Time = std::chrono::steady_clock::time_point;
  struct Options {
    int num_places = 1;
    int min_ranks = 1;
    std::optional<std::chrono::milliseconds> rejoin_after = {};  ///< unset: after bring_back()
    std::function<bool(int)> fits = {};                          ///< unset: any number
  };

  explicit RankPlaces(Options options);

  /// Leaves the place empty: twice as long as last time if it hasn't been in use that long, so that a broken GPU
  /// causes fewer and fewer restarts. Does nothing if groups must have the full size.
  void lose(int place, Time now);
  void bring_back();

  /// The places for a group that starts now: the lowest ones, as many as are available and fit. Empty: too few.
  std::vector<int> available(Time now) const;
  /// When a group could have more than `size` ranks; nullopt: not before bring_back().
  std::optional<Time> next_growth(int size) const;

 private:
  int largest_fit(int num_free) const;

  Options options_;
  std::vector<Time> free_at_;                        // by place
  std::vector<std::chrono::milliseconds> absences_;  // the last absence of each
};

/// How long to wait before a start after `num_short_runs` starts in a row that failed early: 0 after the first,
/// then 1, 2, 4 ... s, at most `longest`.
std::chrono::milliseconds restart_delay(int num_short_runs, std::chrono::milliseconds longest);

/// The GPUs of `places` for CUDA_VISIBLE_DEVICES, taken from `visible` (the variable's value; nullopt: devices
/// 0 to `num_devices` - 1). nullopt: leave the variable as it is, because all places are used or there are fewer
/// GPUs than places.
std::optional<std::string> devices_of_places(const std::vector<int>& places, int num_places,
                                             const std::optional<std::string>& visible, int num_devices);
/// The number of GPUs of this host; doesn't use CUDA.
int num_gpus_of_host();

}  // namespace titan::cli
