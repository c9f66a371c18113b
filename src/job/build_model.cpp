// From settings to the model: its layers, their precision, its parallelism and its weights.

#include <c10/util/StringUtil.h>
#include <torch/nn/module.h>

#include "dist/device_backend.h"
#include "job/build.h"
#include "job/pipeline_stages.h"
#include "nn/constructed_modules.h"
#include "ops/reference_kernels.h"
#include "titan/core/error.h"
#include "titan/core/log.h"
#include "titan/float8/convert.h"
#include "titan/nn/containers.h"
#include "titan/nn/layers.h"
#include "titan/nn/loss.h"
#include "train/checkpoints/run_checkpoints.h"
#include "train/whole_model_runner.h"

namespace titan::train {

Meshes build_job_meshes(const JobConfig& config, const dist::World& world) {
  const ParallelDims dims = resolve_parallel_dims(config.parallelism, world.size());
  if (const auto problem = world_size_problem(dims, world.size())) throw ConfigError(*problem);
  return build_meshes(world, dims);
}

float8::Arithmetic choose_arithmetic(const float8::Recipe& recipe, const std::optional<Gpu>& gpu,
                                     bool emulate, const ConverterKeys& keys) {
  if (emulate) return float8::Arithmetic::Emulated;
  const int first = float8::first_capability(recipe);
  if (gpu && gpu->compute_capability >= first) return float8::Arithmetic::Hardware;
  throw ConfigError(str("model.converters: \"", keys.converter, "\" needs a GPU of compute capability ",
                        first / 10, ".", first % 10, " or above, which ", gpu ? gpu->name : "a CPU",
                        " isn't; ", keys.emulate, " = true gives the same numbers, slowly"));
}

namespace {

constexpr ConverterKeys kFloat8Keys{float8::kConverter, "quantize.linear.float8.emulate"};
constexpr ConverterKeys kMxKeys{float8::kMxConverter, "quantize.linear.mx.emulate"};

std::optional<Gpu> gpu_at(at::Device device) {
  auto* backend = device.is_cpu() || device.is_meta() ? nullptr : dist::device_backend();
  if (!backend) return std::nullopt;
  return Gpu{backend->device_name(device.index()), backend->compute_capability(device.index())};
}

// On the meta device nothing is multiplied.
float8::Arithmetic arithmetic_on(at::Device device, const std::string& recipe, bool emulate,
                                 const ConverterKeys& keys) {
  return choose_arithmetic(float8::recipes().get(recipe), gpu_at(device), emulate || device.is_meta(), keys);
}

float8::ConvertOptions float8_options(const float8::Float8Settings& settings, at::Device device) {
  return {.recipe_name = settings.recipe(),
          .filter_fqns = settings.filter_fqns,
          .arithmetic = arithmetic_on(device, settings.recipe(), settings.emulate, kFloat8Keys),
          .delayed = settings.delayed(),
          .gather = {.in_float8 = settings.enable_fsdp_float8_all_gather,
                     .scales_at_once = settings.precompute_float8_dynamic_scale_for_fsdp}};
}

float8::ConvertOptions mx_options(const float8::MxSettings& settings, at::Device device) {
  return {.recipe_name = settings.recipe_name,
          .filter_fqns = settings.filter_fqns,
          .arithmetic = arithmetic_on(device, settings.recipe_name, settings.emulates(), kMxKeys),
          .composed_block_columns = settings.mxfp8_dim1_cast_kernel_choice == "torch"};
}

std::optional<float8::ConvertOptions> convert_options(const JobConfig& config, at::Device device) {
  if (config.model.converts(float8::kConverter)) return float8_options(config.quantize.float8, device);
  if (config.model.converts(float8::kMxConverter)) return mx_options(config.quantize.mx, device);
  return std::nullopt;
}

// Converts layers if model.converters asks for it. `plain`: the products of layers that stay in high
// precision.
void convert_to_float8(const JobConfig& config, at::Device device, torch::nn::Module& model,
                       const std::shared_ptr<const ops::Products>& plain) {
  auto options = convert_options(config, device);
  if (!options) return;
  options->plain = plain;
  float8::convert(model, *options);
}

// Called after the plan: tensor parallelism may leave parts with sizes that can't be multiplied.
void check_float8_parts(const JobConfig& config, torch::nn::Module& model) {
  const auto lines = float8::unfit_parts(model);
  if (lines.empty()) return;
  throw ConfigError(str(
      "parallelism.tensor_parallel_degree = ", config.parallelism.tensor_parallel_degree,
      " leaves parts of linear layers that can't be multiplied: Float8 needs multiples of 16, MXFP8 of 32: ",
      c10::Join("; ", lines), "; name them in filter_fqns, or use a smaller degree"));
}

// Whether layers that tensor parallelism splits gather activations in Float8: the recipe must cast them once,
// and there must be parts of a sequence to gather.
bool gathers_activations_in_float8(const JobConfig& config) {
  const ParallelismSettings& parallelism = config.parallelism;
  if (parallelism.tensor_parallel_degree <= 1 || !parallelism.enable_sequence_parallel) return false;
  const auto options = convert_options(config, at::kMeta);
  if (!options) return false;
  const float8::Recipe recipe = float8::recipe_of(*options);
  return float8::casts_input_once(recipe) || float8::casts_grad_once(recipe);
}

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
  options.register_buffers = config.comm.register_buffers;
  return options;
}

// Such a stage can't show whether a plan affects layers.
bool is_stage_without_layers(TrainableModel& model) {
  const nn::LayerSequence* sequence = nn::layer_sequence(model.root());
  return sequence && !sequence->is_whole() && sequence->layer_names().layers.empty();
}

std::string plan_name(const JobConfig& config) {
  return config.parallelism.plan.empty() ? config.model.name : config.parallelism.plan;
}

// A family's or a user's plan may ignore an axis; then its ranks would all do the same work.
void check_plan_used(const JobConfig& config, TrainableModel& model, const Meshes& meshes) {
  if (is_stage_without_layers(model)) return;
  const auto check = [&](const std::string& kind, const std::string& degree_key, int degree, bool used) {
    if (degree == 1 || used) return;
    throw ConfigError(str("parallelism.", degree_key, " = ", degree, ": the parallelism plan of ",
                          plan_name(config), " has no ", kind, " parallelism"));
  };
  check("tensor", "tensor_parallel_degree", meshes.tp.size(), !plan_rows(model.root()).empty());
  for (const auto& [axis, apply, is_applied] : chosen_parallelisms(config.parallelism))
    check(axis.kind, axis.degree_key, axis.degree, is_applied(model.root()));
}

// The whole model with sizes only. All of its parameters can be found from its root.
std::unique_ptr<TrainableModel> build_registered(const JobConfig& config, at::Device device) {
  const nn::ConstructedModules constructed;
  auto model =
      config.spec().build(config.args(), {.construct = deferred(device, scalar_type(config.training.dtype)),
                                          .seq_len = config.training.seq_len});
  std::vector<std::string> problems = constructed.unregistered(model->root().module());
  for (std::string& problem : problems)
    problem = str("model.name = ", config.model.name, ": the model doesn't register a module, so its ",
                  "parameters would be neither sharded nor trained nor saved: ", problem,
                  "; pass it to register_module() in the constructor of the module that holds it");
  if (!problems.empty()) throw ConfigError(std::move(problems));
  return model;
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
                        settings.selective_ac_option, "\": the parallelism plan of ", plan_name(config),
                        " checkpoints no layer of this model; set the mode to \"none\""));
}

// From here on, in the whole process.
void choose_kernels(const ops::OpsSettings& settings) {
  if (settings.kernels != "reference" || ops::ReferenceKernels::in_use()) return;
  [[maybe_unused]] static const auto* const for_the_process = new ops::ReferenceKernels;
  log::info("ops.kernels = \"reference\": LibTorch's operations in place of LibTitan's kernels");
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

void log_float8_layers(const JobConfig& config) {
  auto options = convert_options(config, at::kMeta);
  if (!options) return;
  options->plain = ops::default_products();
  const auto model = config.spec().build(
      config.args(), {.construct = deferred(at::kMeta, scalar_type(config.training.dtype)),
                      .seq_len = config.training.seq_len});
  const auto choices = float8::convert(model->root().module(), *options);
  for (const std::string& part : float8::idle_filters(choices, options->filter_fqns))
    log::warning(str("filter_fqns: no linear layer's name contains \"", part, "\""));
  log::info(float8::summary(options->recipe_name, choices));
  if (!config.model.print_after_conversion) return;
  const char* low = config.model.converts(float8::kConverter) ? "Float8" : "MXFP8";
  for (const float8::LayerChoice& choice : choices)
    log::info(str("  ", choice.fqn, ": ", choice.reason.empty() ? low : choice.reason));
}

// First sizes, then shards, then memory: no rank ever holds more of the weights than it keeps.
std::unique_ptr<TrainableModel> build_model(const JobConfig& config, const Meshes& meshes, at::Device device,
                                            const std::vector<std::string>& stage_modules) {
  const ModelSpec& spec = config.spec();
  auto model = build_registered(config, device);
  if (!stage_modules.empty()) keep_stage_modules(*model, stage_modules);
  const auto products = ops::default_products(config.ops.cpu_matmul_policy());
  nn::set_products(model->root().module(), products);
  set_job_loss(config, *model);
  // Before the plan, which sets how the converted layers are split.
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
  choose_kernels(config.ops);
  const at::Device device = meshes.world.world().device();
  if (meshes.pp.size() > 1) return build_pipeline(config, meshes, device, num_batches);
  if (meshes.world.rank() == 0) log_float8_layers(config);
  BuiltModels built;
  built.models.push_back(build_model(config, meshes, device));
  built.parameters = parameters(built.models[0]->root());
  built.runner = std::make_unique<WholeModelRunner>(*built.models[0], device);
  return built;
}

namespace {

// Saved as LAYER.amax_history: the same on all ranks of the stage.
class DelayedScalesState final : public checkpoint::Stateful, public TrainerPolicy {
 public:
  DelayedScalesState(float8::DelayedScales scales, DeviceMesh stage)
      : scales_(std::move(scales)), stage_(std::move(stage)) {}

  checkpoint::ObjectState state() override {
    checkpoint::ObjectState state;
    const std::vector<Placement> placements(static_cast<size_t>(stage_.num_axes()), Placement::replicate());
    for (size_t i = 0; i < scales_.layers().size(); ++i) {
      DTensor history;
      history.local = scales_.history(i);
      history.mesh = stage_;
      history.placements = placements;
      history.global_shape = history.local.sizes().vec();
      history.box = local_box(history.global_shape, stage_, placements);
      state.tensors.push_back({scales_.layers()[i].fqn + ".amax_history", std::move(history)});
    }
    return state;
  }
  void loaded(const std::string& /*text*/) override { scales_.loaded(); }

  // There are no NaNs here, so every reduction finds the same largest value.
  void before_update() override {
    scales_.update([this](const at::Tensor& pending) {
      if (stage_.size() == 1 || scales_.empty()) return;  // a stage may have no such layer
      stage_.group()->all_reduce(pending, dist::ReduceOp::Max, {"float8::delayed_scales"}).wait();
    });
  }

 private:
  float8::DelayedScales scales_;
  DeviceMesh stage_;
};

}  // namespace

std::unique_ptr<TrainerPolicy> build_delayed_scales(
    const JobConfig& config, const std::vector<std::unique_ptr<TrainableModel>>& models, const Meshes& meshes,
    RunCheckpoints* checkpoints) {
  const auto options = convert_options(config, at::kMeta);
  if (!options) return nullptr;
  const float8::DelayedScaling delayed = float8::recipe_of(*options).delayed;
  if (!delayed.any()) return nullptr;
  std::vector<torch::nn::Module*> roots;
  for (const auto& model : models) roots.push_back(&model->root().module());
  const at::Device device = meshes.world.world().device();
  auto scales = std::make_unique<DelayedScalesState>(
      float8::DelayedScales::collect(roots, delayed.history_len, device), meshes.stage);
  if (checkpoints && !config.checkpoint.create_seed_checkpoint) checkpoints->add(kDelayedScales, *scales);
  return scales;
}

}  // namespace titan::train
