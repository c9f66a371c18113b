#pragma once

// Where ranks may run: a job of N ranks has N places on its host, each with its own GPU if there are enough. A
// lost rank's place stays empty for a while, in case the place caused the loss.

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace titan::cli {

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
