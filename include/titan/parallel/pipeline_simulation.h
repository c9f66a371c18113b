#pragma once

// The time and the live activations of a schedule for given costs, without running it.
//
// [Note: the model]
// A rank runs its actions one after the other; only F, B (= I + W), I and W take time. A message to another
// rank takes `communication`, in parallel with all computation, from the time when it is sent and its receive
// is posted (in a schedule without communication: when it is computed). Channels have no limit. Gathering and
// reducing parameters costs nothing. Times are in the unit of the costs.

#include <string>
#include <vector>

#include "titan/parallel/pipeline_schedule.h"

namespace titan::pipeline {

/// Each of the first three: one value per stage, or one for all.
struct Costs {
  std::vector<double> forward = {1};
  std::vector<double> input = {1};   ///< I
  std::vector<double> weight = {1};  ///< W
  double communication = 0;          ///< of one message
  double loss = 0;  ///< of the loss head with its backward, which runs with the last stage's F
};

struct Interval {
  Action action;
  double start = 0, end = 0;
};

struct RankFigures {
  double busy = 0;
  double first_start = 0, last_end = 0;
  // The most of each at any time; a stage's micro-batch counts as 1. What is between F and I only
  // `peak_before_input` counts, part of which I frees; what W needs is kept until then.
  int peak_live = 0;          ///< from F to the end of B or W
  int peak_before_input = 0;  ///< from F to the end of B or I
  int peak_owed_weight = 0;   ///< from the end of I to the end of W
};

/// An entry of Simulation::timeline.
struct PathEntry {
  int rank = 0, index = 0;
  friend bool operator==(const PathEntry&, const PathEntry&) = default;
};

struct Simulation {
  double makespan = 0;         ///< from 0 to the end of the last action
  double bubble_fraction = 0;  ///< the idle part of num_ranks * makespan
  std::vector<RankFigures> ranks;
  std::vector<std::vector<Interval>> timeline;  ///< per rank: its F, B, I and W
  std::vector<PathEntry> critical_path;  ///< from an action that starts at 0 to the last: none can be later
};

/// Throws ConfigError for a schedule that can't run (check_schedule()), for costs below 0 or not finite, and
/// for lists of costs that are neither 1 nor num_stages long.
Simulation simulate(const Schedule& schedule, const Costs& costs = {});

// Simulated schedules for people: a table for the terminal, a drawing for documents.

struct TableStyle {
  int width = 100;       ///< characters per line; longer tables continue in another block of lines
  bool colours = false;  ///< by ANSI sequences
};

/// Time from left to right, a row per rank: "2F5" where the action starts, "-" as long as it lasts, "." where
/// the rank waits. A slot is the shortest action's time (where that makes more than 400 slots, a 400th of the
/// whole, and actions shorter than that may be missing).
std::string to_table(const Simulation& simulation, const TableStyle& style = {});

/// An SVG file by itself: a row per rank, a box per F, B, I and W with its micro-batch, darker for later
/// stages of the rank, a legend and a time axis. `title` stands above.
std::string to_svg(const Schedule& schedule, const Simulation& simulation, const std::string& title);

}  // namespace titan::pipeline
