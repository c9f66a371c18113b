#pragma once

// Whether a schedule can run, before it does. Time and memory grow linearly with its actions.

#include <limits>
#include <string>
#include <vector>

#include "titan/parallel/pipeline_schedule.h"

namespace titan::pipeline {

enum class Purpose {
  Training,    ///< every stage's F and its whole (B) or split (I and W) backward, once per micro-batch
  Evaluation,  ///< every F once and no backward
};

struct CheckOptions {
  Purpose purpose = Purpose::Training;
  /// A send waits while this many messages of its channel (directed pair of ranks) have been sent and no
  /// receive for them is posted; 0: each lasts until its receive is posted.
  int channel_capacity = 1;
  /// Of one rank: micro-batches, counted per stage, between their F and the end of their B or W.
  int max_live_activations = std::numeric_limits<int>::max();
};

/// What is wrong, and where.
struct Problem {
  int rank = -1;      ///< -1: with the whole schedule
  int position = -1;  ///< in the rank's list, from 0; -1: with the whole list
  std::string message;
};

/// "rank 1, action 7 (2B3): ..."; actions are counted from 0.
std::string to_string(const Problem& problem, const Schedule& schedule);

/// What keeps the schedule from running; empty if it runs. In this order, and the first kind alone:
///   1. actions of unknown kind, on a wrong rank, of a stage or micro-batch that doesn't exist, twice, or
///   useless
///      (a send within a rank)
///   2. missing actions; a backward neither whole nor split. Sends and receives are complete or not there at
///   all
///   3. on one rank: actions ahead of what they work on; receives out of their sends' order; a stage's
///   parameters
///      used while not gathered, gathered twice or left gathered (if any Unshard or Reshard is there); a
///      Reduce missing or ahead of the last backward (if any is there); too many live activations
///   4. ranks that wait for each other in a circle
/// The list ends after 20.
std::vector<Problem> find_problems(const Schedule& schedule, const CheckOptions& options = {});

/// Throws ConfigError with the schedule's name and what find_problems() finds.
void check_schedule(const Schedule& schedule, const CheckOptions& options = {});

}  // namespace titan::pipeline
