#pragma once

// titan schedule: what a pipeline schedule looks like, how long it takes and what it holds, without a model.

#include <string>

#include "titan/parallel/pipeline_simulation.h"

namespace titan::cli {

/// The figures of a simulated schedule, a row per rank, and its critical path.
std::string schedule_figures(const pipeline::Schedule& schedule, const pipeline::Simulation& simulation);

/// All named schedules for these counts, as a table in Markdown. A dash stands where a schedule can't be made
/// for them.
std::string schedule_list(int num_ranks, int num_micro_batches, const pipeline::Costs& costs);

}  // namespace titan::cli
