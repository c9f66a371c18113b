#pragma once

// Starting the ranks of a job on this machine, without a tensor: `titan launch -n N -- program ...`, `titan
// train --nproc N`.

#include <chrono>
#include <string>
#include <vector>

namespace titan::cli {

struct LaunchOptions {
  int num_ranks = 1;
  std::vector<std::string> command;       ///< program (looked up in PATH) and its arguments
  std::string log_rank = "0";             ///< whose output is shown: "0", "0,3", "all", "none"
  std::chrono::milliseconds grace{5000};  ///< between asking the ranks to end (SIGTERM) and killing them
};

/// Runs `command` once per rank and waits for all. Each rank gets RANK, WORLD_SIZE, LOCAL_RANK,
/// LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, and OMP_NUM_THREADS = cores / ranks unless it is set;
/// dist::init() understands them. The port is a free one, already bound when the ranks start (rank 0 inherits
/// the socket as TITAN_STORE_FD), so two jobs never race for one.
///
/// Output lines of the ranks in `log_rank` come out tagged "[rank 3] ", standard output on standard output,
/// errors on errors. When a rank fails, the others are ended and the last lines of the one that failed first
/// are printed in a box at the very end, whether it was shown or not. SIGINT, SIGTERM and SIGHUP are passed
/// on to all ranks. Should this process die, the kernel kills the ranks.
///
/// Returns 0 when all ranks did, else the first failing rank's exit code, 128 + signal when a signal ended it
/// or this process was told to end, 127 when the program can't be started. Throws ConfigError for bad
/// options.
int launch_local(const LaunchOptions& options);

/// `titan launch`: `arguments` after the word "launch". Prints its usage for --help.
int launch_command(const std::vector<std::string>& arguments);

}  // namespace titan::cli
