#include "job/build.h"

#include <ATen/Context.h>
#include <torch/nn/module.h>

#include "core/process_stats.h"
#include "dist/device_backend.h"
#include "job/checkpoint_job.h"
#include "job/debug_traces.h"
#include "job/device_rate.h"
#include "job/flight_watch.h"
#include "job/float8_job.h"
#include "job/pipeline/stages.h"
#include "job/profiling_job.h"
#include "job/run_watchdog.h"
#include "observe/process_identity.h"
#include "observe/profiling.h"
#include "titan/config/load.h"
#include "titan/core/file.h"
#include "titan/core/log.h"
#include "titan/data/feed.h"
#include "titan/nn/containers.h"
#include "titan/nn/linear.h"
#include "titan/observe/stragglers.h"
#include "titan/observe/structured_log.h"

namespace titan::train {

namespace {

std::filesystem::path dump_folder(const JobConfig& config) { return config.job.dump_folder; }

// A run that saves nothing leaves the records of the one whose state it loads.
std::filesystem::path record_folder(const JobConfig& config) {
  const CheckpointSettings& checkpoint = config.checkpoint;
  return checkpoint.enable && checkpoint.load_only ? dump_folder(config) / "load_only" : dump_folder(config);
}

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
  const std::filesystem::path folder = record_folder(config);
  make_folder(folder);
  write_file_atomic(folder / "config.toml", toml);
  if (config.job.save_config_file)
    write_file_atomic(folder / *config.job.save_config_file, config::print_json(job_schema(), config));
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
  const auto check = [&](const std::string& kind, const std::string& degree_key, int degree, bool used) {
    if (degree == 1 || used) return;
    throw ConfigError(str("parallelism.", degree_key, " = ", degree, ": the parallelism plan of ",
                          config.parallelism.plan.empty() ? config.model.name : config.parallelism.plan,
                          " has no ", kind, " parallelism"));
  };
  check("tensor", "tensor_parallel_degree", meshes.tp.size(), !plan_rows(model.root()).empty());
  for (const Parallelism& each : chosen_parallelisms(config.parallelism))
    check(each.kind, each.axis.degree_key, each.axis.degree, each.is_applied(model.root()));
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
  const auto products = ops::default_products(config.ops.cpu_matmul_policy());
  nn::set_products(model->root().module(), products);
  // Before the plan, which tells layers of parts so.
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

namespace {

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
                                        .global_batch_size = validation.global_batch_size,
                                        .local_batch_size = validation.local_batch_size,
                                        .seq_len = validation.seq_len,
                                        .settings = settings_on(device, validation.dataloader)}})};
}

std::unique_ptr<MetricsLogger> build_logger(const JobConfig& config, const dist::World& world,
                                            bool on_terminal) {
  // Rank 0's files stay where tools look for them.
  const bool all_ranks = config.metrics.save_for_all_ranks;
  auto folder = record_folder(config);
  if (world.rank() != 0) folder /= str("rank_", world.rank());
  return std::make_unique<MetricsLogger>(MetricsLogger::Options{.settings = config.metrics,
                                                                .folder = folder,
                                                                .total_steps = config.training.steps,
                                                                .writes = all_ranks || world.rank() == 0,
                                                                .on_terminal = on_terminal});
}

std::unique_ptr<StructuredLog> build_structured_log(const JobConfig& config, const dist::World& world) {
  const StructuredLogSettings& settings = config.structured_logs;
  if (!settings.enable) return nullptr;
  auto log = std::make_unique<StructuredLog>(
      StructuredLog::Options{.folder = dump_folder(config) / settings.folder,
                             .rank = world.rank(),
                             .local_rank = world.local_rank(),
                             .max_bytes = settings.max_mib << 20,
                             .kept_processes = static_cast<size_t>(settings.keep_latest_k),
                             .environment = process_environment_json(world, world.device())});
  log->startup(seconds_since_process_start());
  return log;
}

std::vector<nn::AnyRef> roots(const StageParts& stages) {
  std::vector<nn::AnyRef> models;
  for (const auto& model : stages.models) models.push_back(model->root());
  return models;
}

// Until the end of the first step the watchdog is to be faster than a collective's own limit, too.
std::unique_ptr<RunObserver> build_watchdog(const JobConfig& config, const dist::World& world,
                                            const StageParts& stages,
                                            const std::shared_ptr<dist::FlightDump>& flight) {
  const CommSettings& comm = config.comm;
  if (!comm.watchdog) return nullptr;
  world.set_timeout(std::chrono::seconds(collective_timeout_s(comm, config.checkpoint)));
  return std::make_unique<RunWatchdog>(
      world,
      dist::WatchdogOptions{.limits = startup_limits(comm, config.checkpoint),
                            .folder = dump_folder(config) / comm.save_traces_folder,
                            .flight = flight,
                            .computing_is_progress = world.device().is_cpu()},
      training_limits(comm, config.checkpoint), roots(stages));
}

/// What `make` makes, in a span of the structured log.
template <class Make>
auto in_span(StructuredLog* log, const char* name, const Make& make) {
  const StructuredSpan span(log, name, "titan::train::build_trainer");
  return make();
}

RunObservers build_observers(const JobConfig& config, const dist::World& world, const Meshes& meshes,
                             std::unique_ptr<StructuredLog> structured_log) {
  RunObservers observers;
  observers.push_back(std::make_unique<FlightPhases>(world.shared_recorder()));
  StructuredLog* log = structured_log.get();
  if (log) observers.push_back(std::move(structured_log));
  if (config.stragglers.enable && world.size() > 1)
    observers.push_back(std::make_unique<StragglerWatch>(world, meshes.pp.rank(), config.stragglers, log));
  return observers;
}

TrainerOptions build_options(const JobConfig& config, const dist::World& world) {
  TrainerOptions options;
  options.steps = config.training.steps;
  options.log_freq = config.metrics.log_freq;
  options.max_norm = config.training.max_norm;
  options.train_timeout_s = collective_timeout_s(config.comm, config.checkpoint);
  // With shards in host memory the optimizer is the host's: nothing of it can be skipped on the device.
  if (config.training.enable_cpu_offload) options.read_late = false;
  options.seed_checkpoint = config.checkpoint.enable && config.checkpoint.create_seed_checkpoint;
  options.seed = config.debug.seed_or_default();
  options.fault_tolerance = config.fault_tolerance;
  options.on_start = [config, world] { save_config(config, world); };
  return options;
}

void describe_job(const JobConfig& config, const dist::World& world, const Meshes& meshes) {
  std::string rows;
  for (const Parallelism& each : chosen_parallelisms(config.parallelism))
    if (each.axis.degree > 1) rows += str(", ", each.kind, " parallel ", each.axis.degree);
  ModelSizes sizes = config.spec().sizes(config.args());
  log::info_rank0(str(config.job.description, ": ", config.model.name, " ", config.model.flavor, ", ",
                      sizes.num_params, " parameters, on ", world.size(), " rank(s) of ",
                      world.device().str(), " over ", world.backend(), ", data parallel ", meshes.dp_degree(),
                      rows, meshes.tp.size() > 1 ? str(", tensor parallel ", meshes.tp.size()) : "",
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
                     .timeout = std::chrono::seconds(config.comm.init_timeout_seconds),
                     .flight_entries = static_cast<size_t>(config.comm.trace_buf_size),
                     .check_collectives = config.debug.check_collectives});
}

Trainer build_trainer(const JobConfig& config, const dist::World& world, bool on_terminal,
                      const CheckedFiles& checked, const std::shared_ptr<dist::FlightDump>& flight) {
  check_offload(config, world.device());
  if (world.rank() == 0) make_folder(dump_folder(config));
  auto structured_log = build_structured_log(config, world);
  set_determinism(config.debug);
  const at::Device device = world.device();
  start_memory_history(config, device);
  Meshes meshes = build_job_meshes(config, world);
  describe_job(config, world, meshes);
  seed_generators(config.debug, meshes);
  const auto tokenizer = build_job_tokenizer(config, checked);
  StructuredLog* const log = structured_log.get();
  auto loader = in_span(log, "DataLoader.build",
                        [&] { return build_training_loader(config, meshes, world.device(), tokenizer); });
  auto validator = in_span(log, "Validator.build",
                           [&] { return build_validator(config, meshes, world.device(), tokenizer); });
  StageParts stages = in_span(log, "model_parallelism_init", [&] {
    return build_stage_parts(config, meshes, device, loader.num_micro_batches());
  });
  std::vector<Parameter> parameters;
  for (const auto& model : stages.models)
    for (Parameter& parameter : titan::parameters(model->root())) parameters.push_back(std::move(parameter));
  TiedGradients tied(parameters, meshes.pp);
  auto optimizer = in_span(log, "Optimizer.build", [&] {
    return optim::Optimizer(parameters, config.optimizer, names_elsewhere(parameters, meshes));
  });
  optim::LrSchedule schedule(config.lr_scheduler, config.training.steps);
  MetricsWindow window(device, device_rate(config, meshes, device));
  auto checkpoints = in_span(log, "Checkpointer.build",
                             [&] { return build_checkpoints(config, world, meshes, parameters); });
  auto before_optimizer = build_delayed_scales(config, stages, meshes, device, checkpoints.get());
  auto logger = build_logger(config, world, on_terminal);
  auto observers = build_observers(config, world, meshes, std::move(structured_log));
  StepProfiler* const profiler = add_profilers(observers, config, world, stages, log);
  if (config.debug.nan_trace || config.debug.detect_anomaly)
    observers.push_back(std::make_unique<DebugTraces>(config.debug, roots(stages), parameters, world.rank()));
  if (auto watchdog = build_watchdog(config, world, stages, flight)) {
    if (profiler) profiler->tell_of_writing(*watchdog);
    observers.push_back(std::move(watchdog));
  }
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
                  .validator = std::move(validator),
                  .checkpoints = std::move(checkpoints),
                  .observers = std::move(observers),
                  .before_optimizer = std::move(before_optimizer)},
                 build_options(config, world));
}

}  // namespace titan::train
