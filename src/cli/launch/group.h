#pragma once

// A group of ranks, from the start of the first process to the end of the last one.

#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "cli/launch/launch.h"
#include "cli/launch/signals.h"

namespace titan::cli {

/// Environment variables of a child, added to this process's.
using Variables = std::map<std::string, std::string>;

struct GroupOptions {
  const LaunchOptions& job;
  const ShownRanks& shown;
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
    Stopped,    ///< asked to end by `stop_signal`, and not all ranks returned 0
    Outgrown,   ///< stopped because a larger group can start; see `ended_badly`
    CantStart,  ///< see `start_error`
  };
  Kind kind = Kind::Done;
  int stop_signal = 0;  ///< the signal that asked for the end; 0: none
  std::chrono::steady_clock::time_point stop_requested_at = {};
  bool stop_requested_twice = false;  ///< asked to end at once
  std::string start_error = {};
  /// After a request to end: the ranks that didn't return 0, and how they ended; empty: all returned 0.
  std::string ended_badly = {};
  std::chrono::duration<double> run_time = {};

  bool has_failed = false;  ///< a rank failed, asked to end or not; if so:
  int exit_code = 0;        ///< the first failed rank's; 128 + signal if a signal ended it
  /// Ranks that failed by themselves, not because others did: those that a signal ended, hung ones, or else
  /// the first one.
  std::vector<LostRank> lost = {};
  /// A box with the rank that failed first, and its last lines unless they were shown.
  std::string report = {};
};

/// Starts the ranks and waits for the end of the last one.
GroupEnd run_group(int num_ranks, GroupOptions options, SignalReader& signals);

}  // namespace titan::cli
