#pragma once

// Simulated schedules for people: a table for the terminal, a drawing for documents.

#include <string>

#include "titan/parallel/pipeline_simulation.h"

namespace titan::pipeline {

struct TableStyle {
  int width = 100;       ///< characters a line; what is longer goes on in a further block of lines
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
