#include "job/build.h"

#include <ATen/Context.h>

#include "core/file.h"
#include "core/process.h"
#include "core/units.h"
#include "dist/device_backend.h"
#include "guard/policies.h"
#include "guard/run_observers.h"
#include "job/pipeline_stages.h"
#include "observe/profiling.h"
#include "observe/stragglers.h"
#include "observe/structured_log.h"
#include "titan/config/load.h"
#include "titan/core/log.h"
#include "titan/data/feed.h"
#include "titan/observe/metrics.h"
#include "train/checkpoints/run_checkpoints.h"
#include "train/policies/fault_tolerance.h"
#include "train/policies/validation.h"

namespace titan::train {

namespace {

std::filesystem::path dump_folder(const JobConfig& config) { return config.job.dump_folder; }

void set_determinism(const DebugSettings& debug) {
  if (!debug.deterministic) return;
  at::globalContext().setDeterministicAlgorithms(true, debug.deterministic_warn_only);
  at::globalContext().setDeterministicCuDNN(true);
  at::globalContext().setBenchmarkCuDNN(false);
}

// Seeds LibTorch's own generators, which dropout uses: different numbers for different tokens and stages.
void seed_generators(const DebugSettings& debug, const Meshes& meshes) {
  at::manual_seed(debug.seed_or_default() + static_cast<uint64_t>(meshes.loss.rank()));
}

// Replaces the settings of an earlier start. If they differ, they are kept as config.1.toml, ...
void save_settings(const std::filesystem::path& file, const std::string& text) {
  std::error_code error;
  if (std::filesystem::is_regular_file(file, error) && read_file(file) == text) return;
  if (const auto kept = keep_earlier_file(file))
    log::info(str("the different settings of an earlier start in this folder are kept: ", kept->string()));
  write_file_atomic(file, text);
}

void save_config(const JobConfig& config, const dist::World& world) {
  if (world.rank() != 0) return;
  std::string toml = config::print_toml(job_schema(), config);
  const std::filesystem::path folder = record_folder(config);
  make_folder(folder);
  save_settings(folder / "config.toml", toml);
  if (config.job.save_config_file)
    save_settings(folder / *config.job.save_config_file, config::print_json(job_schema(), config));
  if (config.job.print_config) log::info("resolved config:\n" + toml);
}

// Where this rank writes its metrics; unset: nowhere.
std::optional<std::filesystem::path> metrics_folder(const JobConfig& config, const dist::World& world) {
  // Rank 0's files stay where tools look for them.
  if (world.rank() == 0) return record_folder(config);
  if (!config.metrics.save_for_all_ranks) return std::nullopt;
  return record_folder(config) / str("rank_", world.rank());
}

// Every rank measures, so that none is faster than the others.
std::unique_ptr<RooflineReport> build_roofline(const JobConfig& config, const dist::World& world) {
  const at::Device device = world.device();
  RooflineReport::Options options{.folder = metrics_folder(config, world), .limits = {}};
  if (!device.is_cpu())
    options.limits = device_limits(config, dist::device_backend()->device_name(device.index()));
  return std::make_unique<RooflineReport>(world, std::move(options));
}

// Null if this rank logs no metrics.
std::unique_ptr<MetricsLogger> build_logger(const JobConfig& config, const dist::World& world,
                                            bool on_terminal) {
  const auto folder = metrics_folder(config, world);
  if (!folder) return nullptr;
  return std::make_unique<MetricsLogger>(MetricsSinkOptions{.settings = config.metrics,
                                                            .folder = *folder,
                                                            .total_steps = config.training.steps,
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

std::vector<nn::AnyRef> roots(const Models& models) {
  std::vector<nn::AnyRef> roots;
  for (const auto& model : models) roots.push_back(model->root());
  return roots;
}

// The watchdog must act before a collective's own limit, also during the first step.
std::unique_ptr<RunObserver> build_watchdog(const JobConfig& config, const dist::World& world,
                                            const Models& models,
                                            const std::shared_ptr<dist::Watchdog>& watchdog) {
  const CommSettings& comm = config.comm;
  if (!comm.watchdog) return nullptr;
  world.set_timeout(std::chrono::seconds(collective_timeout_s(comm, config.checkpoint)));
  return std::make_unique<RunWatchdog>(watchdog ? watchdog : make_watchdog(config, world),
                                       startup_limits(comm, config.checkpoint),
                                       training_limits(comm, config.checkpoint), roots(models));
}

/// Runs `make` inside a span of the structured log.
template <class Make>
auto in_span(StructuredLog* log, const char* name, const Make& make) {
  const StructuredSpan span(log, name, "titan::train::build_trainer");
  return make();
}

RunObservers build_observers(const JobConfig& config, const dist::World& world, const Meshes& meshes,
                             std::unique_ptr<StructuredLog> structured_log, bool on_terminal) {
  RunObservers observers;
  if (auto logger = build_logger(config, world, on_terminal)) observers.push_back(std::move(logger));
  observers.push_back(std::make_unique<FlightPhases>(world.shared_recorder()));
  StructuredLog* log = structured_log.get();
  if (log) observers.push_back(std::move(structured_log));
  if (config.stragglers.enable && world.size() > 1)
    observers.push_back(std::make_unique<StragglerWatch>(world, meshes.pp.rank(), config.stragglers, log));
  if (config.metrics.report_roofline) observers.push_back(build_roofline(config, world));
  return observers;
}

TrainerOptions build_options(const JobConfig& config, const dist::World& world) {
  TrainerOptions options;
  options.steps = config.training.steps;
  options.log_freq = config.metrics.log_freq;
  options.max_norm = config.training.max_norm;
  options.train_timeout_s = collective_timeout_s(config.comm, config.checkpoint);
  // With shards in host memory the optimizer runs on the host: the device can't skip its step.
  if (config.training.enable_cpu_offload) options.read_late = false;
  options.record_steps = config.compile.enable;
  options.seed_checkpoint = config.checkpoint.enable && config.checkpoint.create_seed_checkpoint;
  options.seed = config.debug.seed_or_default();
  options.on_start = [config, world] { save_config(config, world); };
  return options;
}

void describe_job(const JobConfig& config, const dist::World& world, const Meshes& meshes) {
  if (config.compile.enable && meshes.pp.size() > 1)
    log::warning_rank0(
        "compile.enable: graphs of a pipeline's schedule have run on virtual GPUs only; if a step hangs, "
        "turn it off (docs/gpu_performance.md)");
  std::string rows;
  for (const RowMesh& axis : meshes.row_axes) rows += str(", ", axis.kind, " parallel ", axis.mesh.size());
  ModelSizes sizes = config.spec().sizes(config.args());
  log::info_rank0(str(config.job.description, ": ", config.model_title(), ", ", sizes.num_params,
                      " parameters, on ", world.size(), " rank(s) of ", world.device().str(), " over ",
                      world.backend(), ", data parallel ", meshes.dp_degree(), rows,
                      meshes.tp.size() > 1 ? str(", tensor parallel ", meshes.tp.size()) : "",
                      meshes.pp.size() > 1 ? str(", pipeline parallel ", meshes.pp.size()) : "",
                      config.parallelism.plan.empty() ? "" : ", plan ", config.parallelism.plan));
  if (world.device().is_cuda()) log::info_rank0("GPU settings: " + dist::device_backend()->settings());
}

// training.device = "auto" may have found no GPU, which check_job couldn't know.
void check_offload(const JobConfig& config, at::Device device) {
  if (config.training.enable_cpu_offload && device.is_cpu())
    throw ConfigError(
        str("training.enable_cpu_offload: offloading to the CPU needs a GPU to offload from, and "
            "training.device = ",
            config.training.device, " selects the CPU here"));
}

constexpr char kUsers = 'c', kOthers = 'e';  // kinds of errors

// The error of `part`, after a letter for its kind; empty if there is none.
std::string problem_with(const std::function<void()>& part) {
  try {
    part();
    return "";
  } catch (const ConfigError& error) {
    return kUsers + std::string(error.what());
  } catch (const std::exception& error) {
    return kOthers + std::string(error.what());
  }
}

// Rank 0 comes first, then the first ranks of the other hosts, which may have their own disks, then the rest.
data::InTurn turns(const dist::World& world) {
  if (world.size() == 1) return {};
  return [world](const std::function<void()>& part, std::chrono::seconds limit) {
    constexpr dist::Label kLabel{"data::in_turn"};
    const auto everyone = world.everyone();
    const int mine = world.rank() == 0 ? 0 : world.local_rank() == 0 ? 1 : 2;
    everyone->set_timeout(limit);
    for (const int turn : {0, 1, 2}) {
      // The kind of the error is the same on all ranks, so that the launcher starts none of them again in vain.
      std::string problem;
      if (turn == mine) problem = problem_with(part);
      for (const std::string& text : everyone->all_gather_text(problem, kLabel)) {
        if (text.starts_with(kUsers)) throw ConfigError(text.substr(1));
        if (!text.empty()) throw Error(text.substr(1));
      }
    }
    everyone->set_timeout(world.timeout());
  };
}

// `table`: [training] or [validation].
template <class Table>
data::FeedRequest feed_of(const JobConfig& config, const Table& table,
                          const std::shared_ptr<const data::Tokenizer>& tokenizer, bool repeat) {
  data::DataSettings settings = config.data;
  if (!settings.seed) settings.seed = config.debug.seed;
  const std::filesystem::path cache = settings.cache_folder;
  return {.dataset = table.dataset,
          .source = {table.dataset_path.value_or(""), settings,
                     cache.empty() ? dump_folder(config) / "data_cache" : cache},
          .tokenizer = table.dataset == kStoredTokens ? nullptr : tokenizer,
          .model_vocab_size = config.spec().sizes(config.args()).vocab_size,
          .repeat = repeat};
}

template <class Table>
data::DataLoader build_loader(const JobConfig& config, const Meshes& meshes, const Table& table,
                              const std::shared_ptr<const data::Tokenizer>& tokenizer, bool repeat) {
  data::FeedRequest feed = feed_of(config, table, tokenizer, repeat);
  feed.source.in_turn = turns(meshes.world.world());
  data::LoaderOptions options{.dp_rank = meshes.dp_rank(),
                              .dp_size = meshes.dp_degree(),
                              .global_batch_size = table.global_batch_size,
                              .local_batch_size = table.local_batch_size,
                              .seq_len = table.seq_len,
                              .settings = table.dataloader,
                              .document_end = document_end(config, tokenizer.get())};
  // A copy from pageable memory would make the host wait for the GPU.
  options.settings.pin_memory |= meshes.world.world().device().is_cuda();
  return data::DataLoader(data::build_feed(feed), options);
}

constexpr double kMostInvalid = 0.01;  // share of the text that isn't UTF-8

// Returns the tokens of an epoch, 0 if unknown. Rank 0 reads samples for all.
int64_t report_data(const char* name, const data::DataLoader& loader, int64_t seq_len, int64_t steps) {
  const data::FeedSize size = loader.feed().measure();
  const int64_t step_tokens = loader.num_lanes() * seq_len;
  std::string text = str(name, " data: ");
  if (size.documents > 0) text += str(size.documents, size.documents == 1 ? " document" : " documents");
  if (size.bytes > 0) text += str(", ", size_text(size.bytes));
  if (size.tokens > 0)
    text += str(size.documents > 0 ? ", " : "", size.is_exact ? "" : "about ", size.tokens, " tokens");
  if (size.tokens > 0 && steps > 0) {
    char epochs[96];
    std::snprintf(
        epochs, sizeof epochs, "; %lld steps of %lld tokens read them about %.3g times",
        static_cast<long long>(steps), static_cast<long long>(step_tokens),
        static_cast<double>(steps) * static_cast<double>(step_tokens) / static_cast<double>(size.tokens));
    text += epochs;
  }
  if (size.documents > 0 || size.tokens > 0) log::info(text);
  if (steps > 0 && size.tokens > 0 && size.tokens < step_tokens)
    log::warning(str("the ", name, " data are less than one global batch of ", step_tokens,
                     " tokens: every step repeats them"));
  if (size.invalid > kMostInvalid) {
    char share[32];
    std::snprintf(share, sizeof share, "%.2g %%", 100 * size.invalid);
    log::warning(
        str("about ", share, " of the ", name,
            " data isn't valid UTF-8: the files have another encoding, or aren't text. Tokenizers of "
            "text read such bytes as U+FFFD"));
  }
  return size.tokens;
}

}  // namespace

data::FeedRequest training_feed(const JobConfig& config,
                                const std::shared_ptr<const data::Tokenizer>& tokenizer) {
  return feed_of(config, config.training, tokenizer, /*repeat=*/true);
}

std::filesystem::path record_folder(const JobConfig& config) {
  const CheckpointSettings& checkpoint = config.checkpoint;
  return checkpoint.enable && checkpoint.load_only ? dump_folder(config) / "load_only" : dump_folder(config);
}

dist::World build_world(const JobConfig& config, int fake_ranks) {
  // "auto" means the CPU to a fake world, which plans and tests make on machines with a GPU, too.
  const bool may_be_on_gpu = fake_ranks > 0 && config.training.device == "auto";
  const bool is_on_gpu = may_be_on_gpu && dist::open_cuda_plugin();
  if (may_be_on_gpu && !is_on_gpu)
    if (const std::string warning = dist::unused_gpu_warning("auto", dist::gpu_visible(),
                                                             dist::cuda_plugin_path(), dist::cuda_failure());
        !warning.empty())
      log::warning(warning);
  return dist::init({.backend = fake_ranks > 0 ? "fake" : config.comm.backend,
                     .device = is_on_gpu ? "cuda" : config.training.device,
                     .timeout = std::chrono::seconds(config.comm.init_timeout_seconds),
                     .flight_entries = static_cast<size_t>(config.comm.trace_buf_size),
                     .check_collectives = config.debug.check_collectives,
                     .fake_world_size = std::max(fake_ranks, 1)});
}

TrainerPolicies fault_tolerance_policies(const FaultToleranceSettings& settings, const dist::World& world) {
  TrainerPolicies policies;
  policies.push_back({"stop_on_signal", std::make_unique<StopOnSignal>(world)});
  policies.push_back({"nonfinite", std::make_unique<NonFiniteSteps>(settings)});
  policies.push_back({"nan_replay", std::make_unique<NanReplay>()});
  if (settings.spike_sigma > 0) policies.push_back({"spikes", std::make_unique<RewindOnSpike>(settings)});
  if (settings.check_replicas_freq > 0)
    policies.push_back({"replica_check", std::make_unique<ReplicaCheck>(settings.check_replicas_freq)});
  return policies;
}

Trainer build_trainer(const JobConfig& config, const dist::World& world, bool on_terminal,
                      const CheckedFiles& checked, const std::shared_ptr<dist::Watchdog>& watchdog) {
  check_offload(config, world.device());
  if (world.rank() == 0) make_folder(dump_folder(config));
  auto structured_log = build_structured_log(config, world);
  set_determinism(config.debug);
  const at::Device device = world.device();
  // Before anything that the snapshots should show is allocated.
  if (config.profiling.enable_memory_snapshot) record_memory_history(device);
  Meshes meshes = build_job_meshes(config, world);
  describe_job(config, world, meshes);
  seed_generators(config.debug, meshes);
  auto tokenizer = checked.tokenizer;
  if (!tokenizer && config.reads_text()) tokenizer = data::build_tokenizer(config.model.hf_assets_path);
  StructuredLog* const log = structured_log.get();
  auto loader = in_span(log, "DataLoader.build", [&] {
    return build_loader(config, meshes, config.training, tokenizer, /*repeat=*/true);
  });
  int64_t tokens_per_epoch = 0;
  if (world.rank() == 0)
    tokens_per_epoch = report_data("training", loader, config.training.seq_len, config.training.steps);
  auto validation = in_span(log, "Validator.build", [&]() -> std::unique_ptr<TrainerPolicy> {
    if (!config.validation.enable) return nullptr;
    auto set = build_loader(config, meshes, config.validation, tokenizer, /*repeat=*/false);
    // It isn't repeated, so the number of steps says nothing of it.
    if (world.rank() == 0) report_data("validation", set, config.validation.seq_len, /*steps=*/0);
    return std::make_unique<Validation>(config.validation, std::move(set));
  });
  auto [models, parameters, runner] = in_span(log, "model_parallelism_init", [&] {
    return build_models(config, meshes, loader.num_micro_batches());
  });
  auto optimizer = in_span(log, "Optimizer.build", [&] {
    optim::OptimizerSettings settings = config.optimizer;
    settings.args = config.optimizer_args.settings;
    settings.seed = config.debug.seed_or_default();
    return optim::Optimizer(parameters, settings, names_elsewhere(config, meshes));
  });
  optim::LrSchedulerSettings lr_settings = config.lr_scheduler;
  lr_settings.args = config.lr_scheduler_args.settings;
  const optim::LrSchedule schedule(lr_settings, config.training.steps);
  const MetricsWindow window(device, device_rate(config, meshes, device));
  auto checkpoints = in_span(log, "Checkpointer.build",
                             [&] { return build_checkpoints(config, world, meshes, parameters); });
  auto policies = fault_tolerance_policies(config.fault_tolerance, world);
  if (validation) policies.push_back({"validation", std::move(validation)});
  if (auto scales = build_delayed_scales(config, models, meshes, checkpoints.get()))
    policies.push_back({"float8_scales", std::move(scales)});
  auto observers = build_observers(config, world, meshes, std::move(structured_log), on_terminal);
  StepProfiler* const profiler = add_profilers(observers, config, world, roots(models), log);
  if (config.debug.nan_trace || config.debug.detect_anomaly)
    observers.push_back(
        std::make_unique<NanWatch>(roots(models), parameters,
                                   NanSearch::Options{.rank = world.rank(),
                                                      .modules = config.debug.nan_trace,
                                                      .operations = config.debug.detect_anomaly}));
  if (auto run_watchdog = build_watchdog(config, world, models, watchdog)) {
    if (profiler) profiler->report_writing_to(*run_watchdog);
    observers.push_back(std::move(run_watchdog));
  }
  TrainerOptions options = build_options(config, world);
  options.tokens_per_epoch = tokens_per_epoch;
  return Trainer({.world = world,
                  .meshes = std::move(meshes),
                  .device = device,
                  .models = std::move(models),
                  .runner = std::move(runner),
                  .parameters = std::move(parameters),
                  .optimizer = std::move(optimizer),
                  .schedule = schedule,
                  .loader = std::move(loader),
                  .window = window,
                  .checkpoints = std::move(checkpoints),
                  .observers = std::move(observers),
                  .policies = std::move(policies)},
                 std::move(options));
}

}  // namespace titan::train
