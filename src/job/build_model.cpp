// From settings to the model: which layers, how spread out, with which weights.

#include <torch/nn/module.h>

#include "job/build.h"
#include "job/float8_job.h"
#include "job/pipeline/stages.h"
#include "titan/nn/containers.h"
#include "titan/nn/layers.h"
#include "titan/nn/loss.h"

namespace titan::train {

Meshes build_job_meshes(const JobConfig& config, const dist::World& world) {
  std::vector<std::string> problems;
  ParallelDims dims = resolve_parallel_dims(config.parallelism, world.size(), problems);
  if (!problems.empty()) throw ConfigError(std::move(problems));
  return build_meshes(world, dims);
}

namespace {

FsdpOptions build_fsdp_options(const JobConfig& config, const Meshes& meshes) {
  FsdpOptions options;
  options.mesh = meshes.fsdp;
  options.param_dtype = scalar_type(config.training.mixed_precision_param);
  options.reduce_dtype = scalar_type(config.training.mixed_precision_reduce);
  options.reshard_after_forward = reshard_policy(config.parallelism.fsdp_reshard_after_forward);
  // In a pipeline, gradients stay whole until the schedule reduces them.
  options.reduce_every_micro_batch =
      config.parallelism.fsdp_reduce_every_micro_batch && meshes.pp.size() == 1;
  options.cpu_offload = config.training.enable_cpu_offload;
  return options;
}

// Such a stage shows nothing of what a plan does to layers.
bool is_stage_without_layers(TrainableModel& model) {
  const nn::LayerSequence* sequence = nn::layer_sequence(model.root());
  return sequence && !sequence->is_whole() && sequence->layer_names().layers.empty();
}

// A family's or a user's plan may ignore an axis; then its ranks would all do the same work.
void check_plan_used(const JobConfig& config, TrainableModel& model, const Meshes& meshes) {
  if (is_stage_without_layers(model)) return;
  const auto check = [&](const std::string& kind, const std::string& degree_key, int degree, bool used) {
    if (degree == 1 || used) return;
    throw ConfigError(str("parallelism.", degree_key, " = ", degree, ": the parallelism plan of ",
                          config.parallelism.plan.empty() ? config.model.name : config.parallelism.plan,
                          " has no ", kind, " parallelism"));
  };
  check("tensor", "tensor_parallel_degree", meshes.tp.size(), !plan_rows(model.root()).empty());
  for (const auto& [axis, apply, is_applied] : chosen_parallelisms(config.parallelism))
    check(axis.kind, axis.degree_key, axis.degree, is_applied(model.root()));
}

// A plan may also ignore checkpointing, or the model may have fewer layers than are counted.
void check_checkpointed(const JobConfig& config, TrainableModel& model) {
  const ActivationCheckpointSettings& settings = config.activation_checkpoint;
  if (settings.mode == "none" || checkpoints_activations(model.root())) return;
  // Every n-th layer may be on other stages.
  const nn::LayerSequence* sequence = nn::layer_sequence(model.root());
  const bool some_layers = settings.mode == "selective" && settings.selective_ac_option != "op";
  if (is_stage_without_layers(model) || (some_layers && sequence && !sequence->is_whole())) return;
  throw ConfigError(str("activation_checkpoint.mode = \"", settings.mode, "\", selective_ac_option = \"",
                        settings.selective_ac_option, "\": the parallelism plan of ",
                        config.parallelism.plan.empty() ? config.model.name : config.parallelism.plan,
                        " checkpoints no layer of this model; set the mode to \"none\""));
}

// Every head computes the same loss; only a pipeline's last stage has one.
void set_job_loss(const JobConfig& config, TrainableModel& model) {
  const nn::LossKind& kind = nn::losses().get(config.loss.name);
  const auto args = config.loss_args.settings ? config.loss_args.settings : kind.make_args();
  const nn::Loss loss = kind.make(args.get());
  const nn::LayerSequence* sequence = nn::layer_sequence(model.root());
  const int64_t num_heads = nn::set_loss(model.root().module(), loss);
  if (num_heads > 0 || !loss || (sequence && !sequence->is_last())) return;
  throw ConfigError(str("loss.name = \"", config.loss.name, "\": the model ", config.model.name,
                        " has no nn::LinearCrossEntropy head that could compute it"));
}

}  // namespace

// First sizes, then shards, then memory: no rank ever holds more of the weights than it keeps.
std::unique_ptr<TrainableModel> build_model(const JobConfig& config, const Meshes& meshes, at::Device device,
                                            const std::vector<std::string>& stage_modules) {
  const ModelSpec& spec = config.spec();
  BuildOptions options{.construct = deferred(device, scalar_type(config.training.dtype)),
                       .seq_len = config.training.seq_len,
                       .stage_modules = stage_modules};
  auto model = spec.build(config.args(), options);
  const auto products = ops::default_products(config.ops.cpu_matmul_policy());
  nn::set_products(model->root().module(), products);
  set_job_loss(config, *model);
  // Before the plan, which tells the converted layers how they are cut.
  convert_to_float8(config, device, model->root().module(), products);
  const bool asynchronous = config.parallelism.enable_async_tensor_parallel;
  apply_parallel_plan(
      spec, config.parallelism.plan, *model,
      {.meshes = meshes,
       .fsdp = build_fsdp_options(config, meshes),
       .tensor = {.sequence_parallel = config.parallelism.enable_sequence_parallel,
                  .loss_parallel = !config.parallelism.disable_loss_parallel,
                  .overlap = asynchronous || gathers_activations_in_float8(config),
                  .transport =
                      asynchronous ? overlap_transport(config.parallelism) : OverlapTransport::AtOnce},
       .parallelisms = chosen_parallelisms(config.parallelism),
       .activations = activation_checkpoint(config.activation_checkpoint, meshes.stage.group())});
  check_float8_parts(config, model->root().module());
  check_plan_used(config, *model, meshes);
  check_checkpointed(config, *model);
  materialize(model->root(), config.debug.seed_or_default());
  model->root().module().train();
  return model;
}

BuiltModels build_models(const JobConfig& config, const Meshes& meshes, int64_t num_batches) {
  const at::Device device = meshes.world.world().device();
  if (meshes.pp.size() > 1) return build_pipeline(config, meshes, device, num_batches);
  if (meshes.world.rank() == 0) log_float8_layers(config);
  BuiltModels built;
  built.models.push_back(build_model(config, meshes, device));
  built.parameters = parameters(built.models[0]->root());
  built.runner = std::make_unique<OneStageRunner>(*built.models[0], device);
  return built;
}

}  // namespace titan::train
