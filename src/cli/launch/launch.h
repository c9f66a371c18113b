#pragma once

// Starting the ranks of a job on this machine, without a tensor: `titan launch -n N -- program ...`, `titan
// train --nproc N`. docs/elastic.md says how groups are restarted.

#include <chrono>
#include <filesystem>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "titan/guard/watchdog.h"
#include "titan/train/run_end.h"

namespace titan::cli {

/// Between SIGTERM to the ranks that a failure left and their SIGKILL: each can tell what it has seen before.
inline constexpr std::chrono::seconds kFailureGrace = dist::kExplainsWithin + std::chrono::seconds(1);
static_assert(kFailureGrace < dist::kJobEndsWithin);

/// Exit code of a rank that refuses its settings, as titan::cli::main() has it, and many programs with it.
inline constexpr int kRefusedSettingsCode = 2;

/// What happens when a rank is lost: it was killed, crashed, ended with an error, or hung.
struct RestartOptions {
  int max_restarts = 0;  ///< after which the next loss ends the job
  /// A group may be this small. Below the job's number of ranks, a lost rank's place stays empty for
  /// `rejoin_after`; 0: all places are taken at every start.
  int min_ranks = 0;
  std::optional<std::chrono::milliseconds> rejoin_after =
      std::chrono::seconds(60);        ///< unset: by SIGUSR2 only
  std::function<bool(int)> fits = {};  ///< whether the program can run on so many ranks; unset: on any number
  /// Exit codes of a rank that a restart would only repeat.
  std::set<int> final_codes = {kRefusedSettingsCode, train::kUnsoundRunCode};
  /// Of the waits before restarts of groups that soon fail, which become longer and longer.
  std::chrono::milliseconds longest_delay = std::chrono::seconds(60);
};

struct LaunchOptions {
  int num_ranks = 1;
  std::vector<std::string> command;  ///< program (looked up in PATH) and its arguments
  std::string log_rank = "0";        ///< whose output is shown: "0", "0,3", "all", "none"
  std::chrono::milliseconds grace = kFailureGrace;
  /// The same after a request to stop, as ranks may save; at most 30 s once one has ended with an error.
  std::chrono::milliseconds stop_grace{30000};
  RestartOptions restarts = {};
  /// Where ranks keep what the next ones go on from (checkpoint.peer_folder). When the job ends, what of it
  /// is newer than the run's disk is saved there, and the job's folders are removed.
  std::filesystem::path memory_folder = "/dev/shm";
  /// Called when the job was told to end, by this signal, while no rank ran that could hear of it; behind the
  /// above. What it throws passes through.
  std::function<void(int signal)> on_end_without_ranks = {};
};

/// Runs `command` once per rank and waits for all. Each rank gets RANK, WORLD_SIZE, LOCAL_RANK,
/// LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, TITAN_RESTART_COUNT (how often the ranks were started before),
/// TITAN_MAX_RESTARTS, TITAN_JOB_ID (the same in all starts, and no other job's), and OMP_NUM_THREADS = cores
/// / num_ranks, also where fewer are left, unless it is set; dist::init() understands them. The port is a
/// free one, already bound when the ranks start (rank 0 inherits the socket as TITAN_STORE_FD), so two jobs
/// never race for one.
///
/// Output lines of the ranks in `log_rank` come out tagged "[rank 3] ", standard output on standard output,
/// errors on errors. When a rank fails, the others are ended and the last lines of the one that failed first
/// are printed in a box, whether it was shown or not; then, unless its exit code is a final one, the ranks
/// are started again, while there are restarts left, as many as have a place. SIGINT, SIGTERM, SIGUSR1 and
/// SIGHUP (as SIGTERM) are passed on to all ranks and mean the end, one that comes a second later or more at
/// once; those that this process was started to ignore stay ignored. SIGUSR2 brings all lost places back. A
/// group that is smaller than it could be is asked to stop (SIGTERM) and started again, which is no restart
/// that counts. SIGQUIT goes to all ranks that have a handler for it, which tell what they are at, and means
/// nothing else. With the SIGTERM to ranks that are ended because another failed goes train::kPeerHasFailed.
/// Where a rank gave up on another (dist::kHungExitCode), those that don't end by themselves are the lost
/// ones. Should this process die, the kernel kills the ranks.
///
/// Returns 0 when all ranks did, asked to or not; else 128 + signal when this process was told to end, or the
/// exit code of the rank that failed first (128 + signal when a signal ended it), 127 when the program can't
/// be started, which at a restart counts as a failure. Throws ConfigError for bad options.
int launch_local(const LaunchOptions& options);

/// `titan launch`: `arguments` after the word "launch". Prints its usage for --help.
int launch_command(const std::vector<std::string>& arguments);

}  // namespace titan::cli
