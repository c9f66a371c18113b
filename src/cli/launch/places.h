#pragma once

// Where ranks may run: a job of N ranks has N places on its host, each with a GPU of its own where there are
// so many. A rank that is lost leaves its place empty for a time, in case that it was the place's fault.

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
    std::optional<std::chrono::milliseconds> rejoin_after = {};  ///< unset: until bring_back()
    std::function<bool(int)> fits = {};                          ///< unset: any number
  };

  explicit RankPlaces(Options options);

  /// For twice as long as the last time where it was lost again before it was there for as long: a GPU that
  /// is broken takes fewer and fewer restarts. Does nothing where groups have to be of the full size.
  void lose(int place, Time now);
  void bring_back();

  /// For a group that starts now: as many as are there and fit, the lowest ones. Empty: not enough are.
  std::vector<int> available(Time now) const;
  /// When a group could be larger than one of `size` ranks; nullopt: not before bring_back().
  std::optional<Time> next_growth(int size) const;

 private:
  int largest_fit(int num_free) const;

  Options options_;
  std::vector<Time> free_at_;                        // by place
  std::vector<std::chrono::milliseconds> absences_;  // the last one of each
};

/// How long to wait before another start, behind so many in a row that soon failed: the first comes at once,
/// then 1, 2, 4 ... s up to the `longest`.
std::chrono::milliseconds restart_delay(int num_short_runs, std::chrono::milliseconds longest);

/// The GPUs of `places`, as CUDA_VISIBLE_DEVICES takes them: of those in `visible` (what the variable says
/// now; nullopt: devices 0 to `num_devices` - 1) without the ones that belong to other places. nullopt: as it
/// is, because all places are taken or there isn't a GPU for each.
std::optional<std::string> devices_of_places(const std::vector<int>& places, int num_places,
                                             const std::optional<std::string>& visible, int num_devices);
/// GPUs of this host, without CUDA.
int num_gpus_of_host();

}  // namespace titan::cli
