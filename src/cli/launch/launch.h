#pragma once

// Starts the ranks of a job on this machine: `titan launch -n N -- program ...`, `titan train --nproc N`.
// docs/elastic.md explains how groups are restarted.

#include <chrono>
#include <filesystem>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "titan/train/run_end.h"

namespace titan::cli {

/// Exit code of a rank that refuses its settings. titan::cli::main() and many programs use it.
inline constexpr int kRefusedSettingsCode = 2;

/// How the launcher reacts when a rank is lost: when it was killed, crashed, ended with an error, or hung.
struct RestartOptions {
  int max_restarts = 0;  ///< the loss after that many ends the job
  /// The smallest group. If it is smaller than the job, a lost rank's place stays empty for `rejoin_after`;
  /// 0: every start uses all places.
  int min_ranks = 0;
  /// Unset: only SIGUSR2 brings the place back.
  std::optional<std::chrono::milliseconds> rejoin_after = std::chrono::seconds(60);
  /// Whether the program can run on that many ranks; unset: on any number.
  std::function<bool(int)> fits = {};
  /// Exit codes that are never retried: a restart would only repeat them.
  std::set<int> final_codes = {kRefusedSettingsCode, train::kUnsoundRunCode};
  /// The longest wait before a restart. Waits grow while groups fail early.
  std::chrono::milliseconds longest_delay = std::chrono::seconds(60);
};

struct LaunchOptions {
  int num_ranks = 1;
  std::vector<std::string> command;  ///< program (looked up in PATH) and its arguments
  std::string log_rank = "0";        ///< the ranks whose output is shown: "0", "0,3", "all", "none"
  /// Between a request to stop and SIGKILL, when ranks may save; at most 30 s once a rank has ended with an
  /// error.
  std::chrono::milliseconds stop_grace{30000};
  RestartOptions restarts = {};
  /// Where ranks keep states in memory for the next start (checkpoint.peer_folder). When the job ends, a
  /// state that is newer than the one on disk is saved to disk, and the job's folders are removed.
  std::filesystem::path memory_folder = "/dev/shm";
  /// Called when the job was asked to end by this signal while no rank was running; after the memory was
  /// saved. Its exceptions pass through.
  std::function<void(int signal)> on_end_without_ranks = {};
};

/// `titan launch -n N [--log-rank RANKS] [--max-restarts K ...] [--] program [arguments ...]`: everything
/// after the program's name belongs to the program. Throws as parse_train_arguments().
LaunchOptions parse_launch_arguments(const Arguments& words);

/// The ranks whose lines are shown.
class ShownRanks {
 public:
  /// "0", "0,3", "all" or "none"; throws ConfigError for others.
  ShownRanks(const std::string& text, int num_ranks);
  bool contains(int rank) const { return all_ || ranks_.count(rank) != 0; }

 private:
  bool all_ = false;
  std::set<int> ranks_;
};

/// A job of N ranks has N places on its host, each with its own GPU if there are enough. A lost rank's place
/// stays empty for a while, in case the place caused the loss.
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

  /// Leaves the place empty: twice as long as last time if it hasn't been in use that long, so that a broken
  /// GPU causes fewer and fewer restarts. Does nothing if groups must have the full size.
  void lose(int place, Time now);
  void bring_back();

  /// The places for a group that starts now: the lowest ones, as many as are available and fit. Empty: too
  /// few.
  std::vector<int> available(Time now) const;
  /// When a group could have more than `size` ranks; nullopt: not before bring_back().
  std::optional<Time> next_growth(int size) const;

 private:
  int largest_fit(int num_free) const;

  Options options_;
  std::vector<Time> free_at_;                        // by place
  std::vector<std::chrono::milliseconds> absences_;  // the last absence of each
};

/// How long to wait before a start after `num_short_runs` starts in a row that failed early: 0 after the
/// first, then 1, 2, 4 ... s, at most `longest`.
std::chrono::milliseconds restart_delay(int num_short_runs, std::chrono::milliseconds longest);

/// The GPUs of `places` for CUDA_VISIBLE_DEVICES, taken from `visible` (the variable's value; nullopt:
/// devices 0 to `num_devices` - 1). nullopt: leave the variable as it is, because all places are used or
/// there are fewer GPUs than places.
std::optional<std::string> devices_of_places(const std::vector<int>& places, int num_places,
                                             const std::optional<std::string>& visible, int num_devices);
/// The number of GPUs of this host; doesn't use CUDA.
int num_gpus_of_host();

/// Runs `command` once per rank and waits for all of them.
///
/// Each rank gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT,
/// TITAN_RESTART_COUNT (how often the ranks were started before), TITAN_MAX_RESTARTS, TITAN_JOB_ID (the same
/// in all starts, unique to the job), and, unless it is set, OMP_NUM_THREADS = cores / num_ranks, even when
/// fewer ranks are left. dist::init() understands these. The port is a free one that is already bound when
/// the ranks start (rank 0 inherits the socket as TITAN_STORE_FD), so two jobs never race for a port.
///
/// Output lines of the ranks in `log_rank` are tagged "[rank 3] "; standard output goes to standard output,
/// errors go to errors. When a rank fails, the others are ended, and the last lines of the rank that failed
/// first are printed in a box, whether it was shown or not. Then, unless its exit code is a final one, the
/// ranks are restarted, as many as have a place, while restarts are left. SIGINT, SIGTERM, SIGUSR1 and SIGHUP
/// (as SIGTERM) are passed on to all ranks and end the job; a second one, a second or more later, ends it at
/// once. Signals that this process was started to ignore stay ignored. SIGUSR2 brings all lost places back. A
/// group that could be larger is asked to stop (SIGTERM) and started again; this doesn't count as a restart.
/// SIGQUIT goes to all ranks that have a handler for it, which report what they are doing, and ends nothing.
/// Ranks that are ended because another one failed get SIGTERM with train::kPeerHasFailed. When a rank gave
/// up on another one (dist::kHungExitCode), the ranks that don't end by themselves are the lost ones. If this
/// process dies, the kernel kills the ranks. Threads of this process must block these signals and SIGCHLD:
/// one that doesn't takes them away, and the launcher waits forever.
///
/// Returns 0 if all ranks returned 0, asked to end or not. Otherwise returns 128 + signal if this process was
/// asked to end, or the exit code of the rank that failed first (128 + signal if a signal ended it), or 127
/// if the program can't be started (at a restart that counts as a failure). Throws ConfigError for bad
/// options.
int launch_local(const LaunchOptions& options);

}  // namespace titan::cli
