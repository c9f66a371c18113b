#include "train/pipeline_settings.h"

#include <strings.h>

#include <algorithm>

#include "titan/parallel/pipeline_generators.h"

namespace titan::train {

namespace {

// TorchTitan reads the name without regard to case, and has two more for schedules in a file.
config::Constraint schedule_name() {
  std::vector<std::string> known = pipeline::schedule_names();
  known.insert(known.end(), {"PipelineScheduleSingle", "PipelineScheduleMulti"});
  config::Constraint names = config::one_of(known);
  names.accepts = [known](const config::Value& value) {
    const auto& name = std::get<std::string>(value);
    return std::any_of(known.begin(), known.end(), [&](const std::string& each) {
      return ::strcasecmp(each.c_str(), name.c_str()) == 0;
    });
  };
  return names;
}

}  // namespace

void describe_pipeline_parallel(config::Table<ParallelismSettings>& table) {
  using Settings = ParallelismSettings;
  table.field("pipeline_parallel_degree", &Settings::pipeline_parallel_degree,
              "ranks that share the layers, each with one or several stages of them", config::at_least(1));
  table.field("pipeline_parallel_schedule", &Settings::pipeline_parallel_schedule,
              "who computes when; the last two names go with a file", schedule_name());
  table.field("pipeline_parallel_schedule_csv", &Settings::pipeline_parallel_schedule_csv,
              "a file with the schedule, a row for each rank; empty: made by its name");
  table.field("pipeline_parallel_microbatch_size", &Settings::pipeline_parallel_microbatch_size,
              "sequences that travel together; a divisor of training.local_batch_size", config::at_least(1));
  table.field(
      "pipeline_parallel_max_live_activations", &Settings::pipeline_parallel_max_live_activations,
      "forwards that a rank may hold for their backward, counted per stage; a schedule that holds more "
      "is refused",
      config::at_least(1));
  table.field("pipeline_parallel_split", &Settings::pipeline_parallel_split,
              "layers dealt evenly, or stages that take the same time by computed costs",
              config::one_of({"torchtitan", "balanced"}));
  table.field("pipeline_parallel_split_memory_gib", &Settings::pipeline_parallel_split_memory_gib,
              "with \"balanced\": what the stages of a rank may take together, by computed sizes",
              config::above(0));
  table.field("pipeline_parallel_layers_per_stage", &Settings::pipeline_parallel_layers_per_stage,
              "gives the number of stages; unset: as few for each rank as the schedule takes",
              config::at_least(1));
  table.field("pipeline_parallel_first_stage_less_layers",
              &Settings::pipeline_parallel_first_stage_less_layers,
              "how many layers the embedding counts for where they are dealt", config::at_least(0));
  table.field("pipeline_parallel_last_stage_less_layers", &Settings::pipeline_parallel_last_stage_less_layers,
              "how many layers norm and head count for where they are dealt", config::at_least(0));
  table.field("module_fqns_per_model_part", &Settings::module_fqns_per_model_part,
              "the modules of each stage, in place of a split");
  table.refused("pipeline_parallel_expert_parallel_overlap", true,
                "there are no mixture-of-experts models yet", "expert_parallel_degree");
}

}  // namespace titan::train
