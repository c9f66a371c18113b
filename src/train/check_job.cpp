// Checks between tables, before anything is started.

#include <algorithm>

#include "check_files.h"
#include "titan/dist/device_backend.h"
#include "titan/train/job_config.h"
#include "titan/train/pipeline_stages.h"

namespace titan::train {

namespace {

struct Check {
  const JobConfig& config;
  const config::Origins& origins;
  std::vector<std::string> problems = {};

  void require(bool holds, std::string_view key, const std::string& what) {
    if (!holds) problems.push_back(origins.problem(key, what));
  }
  void add(const std::vector<KeyedProblem>& found) {
    for (const KeyedProblem& problem : found) problems.push_back(origins.problem(problem.key, problem.what));
  }
};

/// Returns the data-parallel degree, where the degrees fit.
std::optional<int> check_parallelism(Check& check, int world_size) {
  std::vector<std::string> problems;
  ParallelDims dims = resolve_parallel_dims(check.config.parallelism, world_size, problems);
  for (const std::string& problem : problems)
    check.problems.push_back(check.origins.problem("parallelism.data_parallel_shard_degree", problem));
  std::vector<KeyedProblem> misfits;
  check_divisibility(dims, check.config.spec().sizes(check.config.args()), check.config.training.seq_len,
                     misfits);
  check_pipeline(check.config, dims, misfits);
  check.add(misfits);

  const ParallelismSettings& parallelism = check.config.parallelism;
  check.require(!parallelism.enable_async_tensor_parallel ||
                    (parallelism.tensor_parallel_degree > 1 && parallelism.enable_sequence_parallel),
                "parallelism.enable_async_tensor_parallel",
                "needs tensor_parallel_degree above 1 and enable_sequence_parallel");
  check.require(parallelism.context_parallel_attention == "ring" ||
                    parallelism.context_parallel_rotate_method == "allgather",
                "parallelism.context_parallel_rotate_method",
                str("is of the ring; context_parallel_attention = \"", parallelism.context_parallel_attention,
                    "\" knows \"allgather\" only"));
  ReshardAfterForward policy = reshard_policy(check.config.parallelism.fsdp_reshard_after_forward);
  check.require(
      policy.kind != ReshardAfterForward::Kind::ToSize || dims.dp_shard * dims.cp % policy.size == 0,
      "parallelism.fsdp_reshard_after_forward",
      str("isn't a divisor of the ", dims.dp_shard * dims.cp, " ranks that parameters are sharded over"));
  return dims.world_size() == world_size ? std::optional(dims.batch_degree()) : std::nullopt;
}

void check_plan(Check& check) {
  const std::string& plan = check.config.parallelism.plan;
  try {
    if (!plan.empty()) parallel_plans().get(plan);
  } catch (const ConfigError& error) {
    check.problems.push_back(check.origins.problem("parallelism.plan", error.problems().front()));
  }
}

void check_model(Check& check) {
  std::vector<std::string> problems;
  check.config.spec().check(check.config.args(), problems);
  for (const std::string& problem : problems) check.problems.push_back(str("model.args: ", problem));
}

void check_precision(Check& check) {
  const TrainingSettings& training = check.config.training;
  bool doubles = training.dtype == "float64";
  check.require((training.mixed_precision_param == "float64") == doubles, "training.mixed_precision_param",
                "float64 training has float64 in training.dtype and training.mixed_precision_param");
  check.require((training.mixed_precision_reduce == "float64") == doubles, "training.mixed_precision_reduce",
                "float64 gradients go with training.dtype = \"float64\"");
  check.require(!training.enable_cpu_offload || training.device != "cpu", "training.enable_cpu_offload",
                "offloading to the CPU needs a GPU to offload from");
}

void check_activations(Check& check) {
  const std::string& device = check.config.training.device;
  const bool on_cpu = device == "cpu" || (device == "auto" && !dist::gpu_visible());
  check.require(
      check.config.activation_checkpoint.mode != "offload" || !on_cpu, "activation_checkpoint.mode",
      "moves activations from a GPU to the host's memory, and this run is on the CPU; take \"full\", "
      "\"selective\" or \"memory_budget\"");
  check.require(check.config.activation_checkpoint.mode == "memory_budget" ||
                    !check.config.activation_checkpoint.memory_budget_bytes,
                "activation_checkpoint.memory_budget_bytes",
                "is read only with activation_checkpoint.mode = \"memory_budget\"");
}

void check_checkpoint(Check& check) {
  const CheckpointSettings& checkpoint = check.config.checkpoint;
  check.require(checkpoint.enable || !checkpoint.initial_load_path, "checkpoint.initial_load_path",
                "is read only with checkpoint.enable = true");
  if (!checkpoint.enable) return;
  const bool has_hf_form = check.config.spec().hugging_face(check.config.args()).has_value();
  for (const auto& [key, asked] : {std::pair("checkpoint.initial_load_in_hf", checkpoint.initial_load_in_hf),
                                   std::pair("checkpoint.last_save_in_hf", checkpoint.last_save_in_hf)})
    check.require(!asked || has_hf_form, key,
                  str("model.name = ", check.config.model.name, " has no form in transformers"));
  check.require(checkpoint.interval >= check.config.training.steps, "checkpoint.interval",
                str("saving between steps comes later; it has to be at least training.steps = ",
                    check.config.training.steps, ", whose model is written"));
}

void check_validation(Check& check, int world_size) {
  const ValidationSettings& validation = check.config.validation;
  if (!validation.enable) return;
  check.require(validation.seq_len <= check.config.training.seq_len, "validation.seq_len",
                str("is longer than training.seq_len = ", check.config.training.seq_len));
  std::vector<std::string> told_already;
  const ParallelDims dims = resolve_parallel_dims(check.config.parallelism, world_size, told_already);
  std::vector<KeyedProblem> misfits;
  check_sequence_length(dims, "validation.seq_len", validation.seq_len, misfits);
  check.add(misfits);
}

}  // namespace

CheckedFiles check_job(const JobConfig& config, const config::Origins& origins, int world_size,
                       JobFiles files) {
  Check check{config, origins};
  check_model(check);
  const std::optional<int> dp_degree = check_parallelism(check, world_size);
  check_plan(check);
  check_precision(check);
  check_activations(check);
  check_checkpoint(check);
  check_validation(check, world_size);
  CheckedFiles checked;
  if (files == JobFiles::Check) checked = check_files(config, origins, dp_degree, check.problems);
  if (!check.problems.empty()) throw ConfigError(std::move(check.problems));
  return checked;
}

}  // namespace titan::train
