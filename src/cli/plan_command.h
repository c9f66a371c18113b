#pragma once

// The parts of titan plan, which a search shares with the plan of one job.

#include <cstdint>
#include <string>
#include <vector>

#include "cli/train.h"
#include "job/job_config.h"
#include "plan/cost_model.h"

namespace titan::cli {

plan::Kernels kernels_of(const std::string& name);

/// Throws ConfigError for settings that can't be planned. Attention within documents becomes causal attention.
train::JobConfig load_planned_job(const PlanArguments& arguments);
/// The parts of a config that a plan leaves out, or plans in another way.
std::vector<std::string> plan_notes(const train::JobConfig& config);
/// Each with a newline.
std::string lines_of(const std::vector<std::string>& notes);
/// The same without what depends on degrees, which a search chooses.
train::JobConfig load_for_search(const PlanArguments& arguments);
/// The sequences of a step, by the config's own batch sizes and degrees.
int64_t sequences_of(const train::JobConfig& config, int world_size);

/// For `titan train`: settings with the degrees that are "auto", and what goes with them, of the layout that the plan finds fastest for the
/// ranks of this machine. The other degrees stay; the batch of a step does, too. Logs the choice and its reasons.
std::vector<std::string> choose_degrees(const TrainArguments& arguments, const train::JobConfig& config);

/// titan plan --search
int search_command(const PlanArguments& arguments);

}  // namespace titan::cli
