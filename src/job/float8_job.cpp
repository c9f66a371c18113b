#include "job/float8_job.h"

#include <optional>

#include <torch/nn/module.h>

#include "dist/device_backend.h"
#include "titan/core/error.h"
#include "titan/core/log.h"
#include "titan/float8/convert.h"
#include "train/checkpoints/run_checkpoints.h"

namespace titan::train {

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
  auto* backend = device.is_cpu() ? nullptr : dist::device_backend();
  if (!backend) return std::nullopt;
  return Gpu{backend->device_name(device.index()), backend->compute_capability(device.index())};
}

// On the meta device nothing is multiplied.
float8::Arithmetic arithmetic_on(at::Device device, const std::string& recipe, bool emulate,
                                 const ConverterKeys& keys) {
  if (emulate || device.is_meta()) return float8::Arithmetic::Emulated;
  return choose_arithmetic(float8::recipes().get(recipe), gpu_at(device), emulate, keys);
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

}  // namespace

void convert_to_float8(const JobConfig& config, at::Device device, torch::nn::Module& model,
                       const std::shared_ptr<const ops::Products>& plain) {
  auto options = convert_options(config, device);
  if (!options) return;
  options->plain = plain;
  float8::convert(model, *options);
}

void check_float8_parts(const JobConfig& config, torch::nn::Module& model) {
  const auto lines = float8::unfit_parts(model);
  if (lines.empty()) return;
  std::string text;
  for (const std::string& line : lines) text += str(text.empty() ? "" : "; ", line);
  throw ConfigError(str(
      "parallelism.tensor_parallel_degree = ", config.parallelism.tensor_parallel_degree,
      " leaves parts of linear layers that can't be multiplied: Float8 takes multiples of 16, MXFP8 of 32: ",
      text, "; name them in filter_fqns, or take a smaller degree"));
}

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

bool gathers_activations_in_float8(const JobConfig& config) {
  const ParallelismSettings& parallelism = config.parallelism;
  if (parallelism.tensor_parallel_degree <= 1 || !parallelism.enable_sequence_parallel) return false;
  const auto options = convert_options(config, at::kMeta);
  if (!options) return false;
  const float8::Recipe recipe = float8::recipe_of(*options);
  return float8::casts_input_once(recipe) || float8::casts_grad_once(recipe);
}

float8::DelayedScaling delayed_scaling(const JobConfig& config) {
  const auto options = convert_options(config, at::kMeta);
  return options ? float8::recipe_of(*options).delayed : float8::DelayedScaling{};
}

namespace {

// Saved as LAYER.amax_history: the same on all ranks of the stage.
class DelayedScalesState : public checkpoint::Stateful {
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
  void update() {
    scales_.update([this](const at::Tensor& pending) {
      if (stage_.size() == 1 || scales_.empty()) return;  // a stage may have no such layer
      stage_.group()->all_reduce(pending, dist::ReduceOp::Max, {"float8::delayed_scales"}).wait();
    });
  }

 private:
  float8::DelayedScales scales_;
  DeviceMesh stage_;
};

class UpdateDelayedScales final : public TrainerPolicy {
 public:
  explicit UpdateDelayedScales(std::unique_ptr<DelayedScalesState> scales) : scales_(std::move(scales)) {}
  void before_update() override { scales_->update(); }

 private:
  std::unique_ptr<DelayedScalesState> scales_;
};

}  // namespace

std::unique_ptr<TrainerPolicy> build_delayed_scales(
    const JobConfig& config, const std::vector<std::unique_ptr<TrainableModel>>& models, const Meshes& meshes,
    RunCheckpoints* checkpoints) {
  const float8::DelayedScaling delayed = delayed_scaling(config);
  if (!delayed.any()) return nullptr;
  std::vector<torch::nn::Module*> roots;
  for (const auto& model : models) roots.push_back(&model->root().module());
  const at::Device device = meshes.world.world().device();
  auto scales = std::make_unique<DelayedScalesState>(
      float8::DelayedScales::collect(roots, delayed.history_len, device), meshes.stage);
  if (checkpoints && !config.checkpoint.create_seed_checkpoint) checkpoints->add(kDelayedScales, *scales);
  return std::make_unique<UpdateDelayedScales>(std::move(scales));
}

}  // namespace titan::train
