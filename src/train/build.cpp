#include "titan/train/build.h"

#include <ATen/Context.h>
#include <torch/nn/module.h>

#include "titan/checkpoint/hf_model.h"
#include "titan/checkpoint/model_file.h"
#include "titan/config/print.h"
#include "titan/core/file.h"
#include "titan/core/log.h"
#include "titan/data/build.h"
#include "titan/dist/device_backend.h"
#include "titan/nn/layer_sequence.h"
#include "titan/nn/linear.h"
#include "train/hf_job.h"
#include "train/pipeline_job.h"

namespace titan::train {

namespace {

std::filesystem::path dump_folder(const JobConfig& config) { return config.job.dump_folder; }

void set_determinism(const DebugSettings& debug) {
  if (!debug.deterministic) return;
  at::globalContext().setDeterministicAlgorithms(true, debug.deterministic_warn_only);
  at::globalContext().setDeterministicCuDNN(true);
  at::globalContext().setBenchmarkCuDNN(false);
}

// Of what a model draws from LibTorch's own generators, as dropout does: other numbers for other tokens and
// stages.
void seed_generators(const DebugSettings& debug, const Meshes& meshes) {
  at::manual_seed(debug.seed_or_default() + static_cast<uint64_t>(meshes.loss.rank()));
}

void save_config(const JobConfig& config, const dist::World& world) {
  if (world.rank() != 0) return;
  std::string toml = config::print_toml(job_schema(), config);
  make_folder(dump_folder(config));
  write_file_atomic(dump_folder(config) / "config.toml", toml);
  if (config.job.save_config_file)
    write_file_atomic(dump_folder(config) / *config.job.save_config_file,
                      config::print_json(job_schema(), config));
  if (config.job.print_config) log::info("resolved config:\n" + toml);
}

}  // namespace

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
  // A schedule's stages keep whole gradients until its Reduce.
  options.reduce_every_micro_batch =
      config.parallelism.fsdp_reduce_every_micro_batch && meshes.pp.size() == 1;
  options.cpu_offload = config.training.enable_cpu_offload;
  return options;
}

// What plans do to layers can't be seen at it.
bool is_stage_without_layers(TrainableModel& model) {
  const nn::LayerSequence* sequence = nn::layer_sequence(model.root());
  return sequence && !sequence->is_whole() && sequence->layer_names().layers.empty();
}

// A family's or a user's plan may not know of an axis; then its ranks would all do the same.
void check_plan_used(const JobConfig& config, TrainableModel& model, const Meshes& meshes) {
  if (is_stage_without_layers(model)) return;
  const auto check = [&](const char* kind, const DeviceMesh& mesh, bool used) {
    if (mesh.size() == 1 || used) return;
    throw ConfigError(str("parallelism.", kind, "_parallel_degree = ", mesh.size(),
                          ": the parallelism plan of ",
                          config.parallelism.plan.empty() ? config.model.name : config.parallelism.plan,
                          " has no ", kind, " parallelism"));
  };
  check("tensor", meshes.tp, !plan_rows(model.root()).empty());
  check("context", meshes.cp, is_context_parallel(model.root()));
}

// Nor of checkpointing; or there are fewer layers than are counted.
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

}  // namespace

// Sizes first, then shards, then memory: no rank ever holds more of the weights than it keeps.
std::unique_ptr<TrainableModel> build_model(const JobConfig& config, const Meshes& meshes, at::Device device,
                                            const std::vector<std::string>& stage_modules) {
  const ModelSpec& spec = config.spec();
  BuildOptions options{.construct = deferred(device, scalar_type(config.training.dtype)),
                       .seq_len = config.training.seq_len,
                       .stage_modules = stage_modules};
  auto model = spec.build(config.args(), options);
  apply_parallel_plan(
      spec, config.parallelism.plan, *model,
      {.meshes = meshes,
       .fsdp = build_fsdp_options(config, meshes),
       .tensor = {.sequence_parallel = config.parallelism.enable_sequence_parallel,
                  .loss_parallel = !config.parallelism.disable_loss_parallel,
                  .overlap = config.parallelism.enable_async_tensor_parallel},
       .context = context_parallel_options(config.parallelism),
       .activations = activation_checkpoint(config.activation_checkpoint, meshes.stage.group())});
  check_plan_used(config, *model, meshes);
  check_checkpointed(config, *model);
  nn::set_products(model->root().module(), ops::default_products(config.ops.cpu_matmul_policy()));
  materialize(model->root(), config.debug.seed_or_default());
  model->root().module().train();
  return model;
}

namespace {

void load_weights(const JobConfig& config, const std::vector<Parameter>& parameters, const DeviceMesh& pp) {
  if (!config.checkpoint.enable) return;
  if (config.checkpoint.initial_load_in_hf) {
    const auto folder = initial_hf_folder(config);
    check_hf_config(config, folder);
    load_hf_model(parameters, configured_hf_model(config), folder);
    return log::info_rank0(str("initial weights come from ", folder.string(), ", in Hugging Face's form"));
  }
  if (!config.checkpoint.initial_load_path) return;
  load_model(parameters, *config.checkpoint.initial_load_path, pp);
  log::info_rank0(str("initial weights come from ", *config.checkpoint.initial_load_path));
}

// What training and validation ask of the loader.
struct LoaderRequest {
  std::string dataset;
  std::optional<std::string> dataset_path;
  std::shared_ptr<const data::Tokenizer> tokenizer;
  bool repeat = true;
  data::LoaderOptions options;
};

data::DataSettings data_settings(const JobConfig& config) {
  data::DataSettings settings = config.data;
  if (!settings.seed) settings.seed = config.debug.seed;
  return settings;
}

// One for training and validation; null where both replay recorded tokens.
std::shared_ptr<const data::Tokenizer> build_job_tokenizer(const JobConfig& config,
                                                           const CheckedFiles& checked) {
  const bool training_reads_text = config.training.dataset != "tokens";
  const bool validation_reads_text = config.validation.enable && config.validation.dataset != "tokens";
  if (checked.tokenizer || !(training_reads_text || validation_reads_text)) return checked.tokenizer;
  return data::build_tokenizer(config.model.hf_assets_path);
}

data::DataLoader build_loader(const JobConfig& config, const LoaderRequest& request) {
  data::FeedRequest feed;
  feed.dataset = request.dataset;
  feed.model_vocab_size = config.spec().sizes(config.args()).vocab_size;
  feed.repeat = request.repeat;
  feed.source = {request.dataset_path.value_or(""), data_settings(config),
                 config.data.cache_folder.empty() ? dump_folder(config) / "data_cache"
                                                  : std::filesystem::path(config.data.cache_folder)};
  if (request.dataset != "tokens") feed.tokenizer = request.tokenizer;
  return data::DataLoader(data::build_feed(feed), request.options);
}

// A copy from pageable memory would make the host wait for what the GPU has to do before it.
data::DataloaderSettings settings_on(at::Device device, data::DataloaderSettings settings) {
  settings.pin_memory = settings.pin_memory || device.is_cuda();
  return settings;
}

data::DataLoader build_training_loader(const JobConfig& config, const Meshes& meshes, at::Device device,
                                       const std::shared_ptr<const data::Tokenizer>& tokenizer) {
  const TrainingSettings& training = config.training;
  return build_loader(config, {.dataset = training.dataset,
                               .dataset_path = training.dataset_path,
                               .tokenizer = tokenizer,
                               .options = {.dp_rank = meshes.dp_rank(),
                                           .dp_size = meshes.dp_degree(),
                                           .global_batch_size = training.global_batch_size,
                                           .local_batch_size = training.local_batch_size,
                                           .seq_len = training.seq_len,
                                           .settings = settings_on(device, training.dataloader)}});
}

std::optional<Validator> build_validator(const JobConfig& config, const Meshes& meshes, at::Device device,
                                         const std::shared_ptr<const data::Tokenizer>& tokenizer) {
  const ValidationSettings& validation = config.validation;
  if (!validation.enable) return std::nullopt;
  return Validator{
      validation,
      build_loader(config, {.dataset = validation.dataset,
                            .dataset_path = validation.dataset_path,
                            .tokenizer = tokenizer,
                            .repeat = false,
                            .options = {.dp_rank = meshes.dp_rank(),
                                        .dp_size = meshes.dp_degree(),
                                        .local_batch_size = validation.local_batch_size,
                                        .seq_len = validation.seq_len,
                                        .settings = settings_on(device, validation.dataloader)}})};
}

DeviceRate build_device_rate(const JobConfig& config, const Meshes& meshes, at::Device device) {
  DeviceRate rate{.flops_per_token = config.spec().flops_per_token(config.args(), config.training.seq_len),
                  .peak_flops = config.metrics.peak_flops,
                  .non_data_parallel_size = meshes.world.size() / meshes.dp_degree()};
  auto* backend = dist::device_backend();
  if (rate.peak_flops || !backend || device.is_cpu()) return rate;
  rate.peak_flops = peak_flops_of(backend->device_name(device.index()));
  if (!rate.peak_flops)
    log::warning_rank0(
        str("no peak FLOPS known of ", backend->device_name(device.index()), "; set metrics.peak_flops"));
  return rate;
}

std::unique_ptr<MetricsLogger> build_logger(const JobConfig& config, const dist::World& world,
                                            bool on_terminal) {
  // Rank 0's files stay where tools look for them.
  const bool all_ranks = config.metrics.save_for_all_ranks;
  auto folder = dump_folder(config);
  if (world.rank() != 0) folder /= str("rank_", world.rank());
  return std::make_unique<MetricsLogger>(MetricsLogger::Options{.settings = config.metrics,
                                                                .folder = folder,
                                                                .total_steps = config.training.steps,
                                                                .writes = all_ranks || world.rank() == 0,
                                                                .on_terminal = on_terminal});
}

TrainerOptions build_options(const JobConfig& config) {
  TrainerOptions options;
  options.steps = config.training.steps;
  options.log_freq = config.metrics.log_freq;
  options.max_norm = config.training.max_norm;
  options.train_timeout_s = config.comm.train_timeout_seconds;
  // With shards in host memory the optimizer is the host's: nothing of it can be skipped on the device.
  if (config.training.enable_cpu_offload) options.read_late = false;
  if (config.checkpoint.enable) {
    options.final_model = final_model_path(config.checkpoint, config.job.dump_folder, config.training.steps);
    options.final_model_dtype = scalar_type(config.checkpoint.export_dtype);
    if (config.checkpoint.last_save_in_hf) {
      options.final_model = options.final_model.parent_path();
      options.final_hf = configured_hf_model(config);
      options.hf_assets = config.model.hf_assets_path;
    }
  }
  return options;
}

void describe_job(const JobConfig& config, const dist::World& world, const Meshes& meshes) {
  ModelSizes sizes = config.spec().sizes(config.args());
  log::info_rank0(str(config.job.description, ": ", config.model.name, " ", config.model.flavor, ", ",
                      sizes.num_params, " parameters, on ", world.size(), " rank(s) of ",
                      world.device().str(), " over ", world.backend(), ", data parallel ", meshes.dp_degree(),
                      meshes.cp.size() > 1 ? str(", context parallel ", meshes.cp.size()) : "",
                      meshes.tp.size() > 1 ? str(", tensor parallel ", meshes.tp.size()) : "",
                      meshes.pp.size() > 1 ? str(", pipeline parallel ", meshes.pp.size()) : "",
                      config.parallelism.plan.empty() ? "" : ", plan ", config.parallelism.plan));
}

// training.device = "auto" may have found no GPU, which check_job couldn't know.
void check_offload(const JobConfig& config, at::Device device) {
  if (config.training.enable_cpu_offload && device.is_cpu())
    throw ConfigError(
        str("training.enable_cpu_offload: offloading to the CPU needs a GPU to offload from, and "
            "training.device = ",
            config.training.device, " is the CPU here"));
}

}  // namespace

dist::World build_world(const JobConfig& config) {
  return dist::init({.backend = config.comm.backend,
                     .device = config.training.device,
                     .timeout = std::chrono::seconds(config.comm.init_timeout_seconds)});
}

Trainer build_trainer(const JobConfig& config, const dist::World& world, bool on_terminal,
                      const CheckedFiles& checked) {
  check_offload(config, world.device());
  if (world.rank() == 0) make_folder(dump_folder(config));
  set_determinism(config.debug);
  const at::Device device = world.device();
  Meshes meshes = build_job_meshes(config, world);
  describe_job(config, world, meshes);
  seed_generators(config.debug, meshes);
  const auto tokenizer = build_job_tokenizer(config, checked);
  auto loader = build_training_loader(config, meshes, world.device(), tokenizer);
  auto validator = build_validator(config, meshes, world.device(), tokenizer);
  StageParts stages = build_stage_parts(config, meshes, device, loader.num_micro_batches());
  std::vector<Parameter> parameters;
  for (const auto& model : stages.models)
    for (Parameter& parameter : titan::parameters(model->root())) parameters.push_back(std::move(parameter));
  TiedGradients tied(parameters, meshes.pp);
  load_weights(config, parameters, meshes.pp);
  optim::Optimizer optimizer(parameters, config.optimizer, names_elsewhere(parameters, meshes));
  optim::LrSchedule schedule(config.lr_scheduler, config.training.steps);
  MetricsWindow window(device, build_device_rate(config, meshes, device));
  // Last, so that a start that fails leaves the record of an earlier run in this folder alone.
  save_config(config, world);
  auto logger = build_logger(config, world, on_terminal);
  return Trainer({.world = world,
                  .meshes = std::move(meshes),
                  .device = device,
                  .stages = std::move(stages),
                  .parameters = std::move(parameters),
                  .tied = std::move(tied),
                  .optimizer = std::move(optimizer),
                  .schedule = schedule,
                  .loader = std::move(loader),
                  .logger = std::move(logger),
                  .window = window,
                  .validator = std::move(validator)},
                 build_options(config));
}

}  // namespace titan::train
