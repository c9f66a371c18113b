#pragma once

// Schedules as CSV files in TorchTitan's and PyTorch's format: a row per pipeline rank, a cell per action.
//
//   0F0,0F1,,,0B0,0B1        F, B, I, W with stage and micro-batch; an empty cell is a pause and means
//   nothing 0UNSHARD,0F0,0SEND_F0    parameter actions and communication may stand in it too
//   (0F3;1B2)OVERLAP_F_B     an F and a B side by side: read as the F, then the B

#include <filesystem>
#include <string>
#include <string_view>

#include "titan/parallel/pipeline_schedule.h"

namespace titan::pipeline {

/// Reads a schedule; the number of stages and micro-batches and the map of stages to ranks follow from the
/// cells. `file` stands in messages and gives the schedule's name. Throws ConfigError with file:line:column
/// for each cell that isn't an action, a stage on two ranks, a row without actions and stages that have none.
/// Whether the schedule can run is check_schedule()'s business.
Schedule parse_schedule_csv(std::string_view text, const std::filesystem::path& file);

/// As above, from a file.
Schedule read_schedule_csv(const std::filesystem::path& file);

/// All actions, a row per rank; parse_schedule_csv() gives the same schedule, but for the name.
std::string to_csv(const Schedule& schedule);

}  // namespace titan::pipeline
