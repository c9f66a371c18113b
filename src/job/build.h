#pragma once

// From settings to a trainer. check_job() has passed before, so what fails here is the environment: files,
// memory, peers.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dist/environment.h"
#include "job/job_config.h"
#include "observe/profiling.h"
#include "observe/roofline.h"
#include "titan/data/feed.h"
#include "titan/dist/world.h"
#include "titan/float8/convert.h"
#include "titan/guard/watchdog.h"
#include "titan/train/trainer.h"
#include "train/checkpoints/run_checkpoints.h"
#include "train/step_runner.h"

namespace titan::train {

using Models = std::vector<std::unique_ptr<TrainableModel>>;

/// Joins the job's other processes, as set by [comm] and training.device. Must be called before the first
/// tensor is made.
/// `fake_ranks` > 0: this process is rank 0 of so many that don't exist (comm.mode).
dist::World build_world(const JobConfig& config, int fake_ranks = 0);

/// Collective over the world.
Meshes build_job_meshes(const JobConfig& config, const dist::World& world);

/// The parallelized model on `device` with its initial weights; on the meta device only with their sizes.
/// `stage_modules`: the modules of a pipeline stage, if only that is built; empty: the whole model.
/// Collective over the meshes, except meshes.pp.
std::unique_ptr<TrainableModel> build_model(const JobConfig& config, const Meshes& meshes, at::Device device,
                                            const std::vector<std::string>& stage_modules = {});

/// This rank's part of the model, and the runner of its steps.
struct BuiltModels {
  Models models;
  std::vector<Parameter> parameters;  ///< the parameters of all models
  std::unique_ptr<StepRunner> runner;
};
/// For steps of `num_batches` batches. Collective over the world.
BuiltModels build_models(const JobConfig& config, const Meshes& meshes, int64_t num_batches);

/// The policies of [fault_tolerance], and one that stops on signals. Collective over the world.
TrainerPolicies fault_tolerance_policies(const FaultToleranceSettings& settings, const dist::World& world);

/// Where a run keeps its config and metrics: job.dump_folder, or a folder below it for a load_only run, which
/// doesn't overwrite the records of the run whose state it loads.
std::filesystem::path record_folder(const JobConfig& config);

/// Builds everything that a trainer needs: model, data, optimizer, checkpoints, observers and policies. Its
/// train() first loads the state that [checkpoint] names, and then writes the resolved config to
/// {dump_folder}/config.toml (rank 0). `on_terminal`: somebody watches the log, so it gets colors and the
/// remaining time. `checked`: files that check_job has already read. `watchdog`: from make_watchdog, or null
/// to make one. Collective over the world.
Trainer build_trainer(const JobConfig& config, const dist::World& world, bool on_terminal = false,
                      const CheckedFiles& checked = {}, const std::shared_ptr<dist::Watchdog>& watchdog = {});

// ---- checkpoints: the initial weights, the run's own states, and Hugging Face folders

/// Throws ConfigError with every difference between a folder's config.json and the configured model.
void check_hf_config(const JobConfig& config, const std::filesystem::path& folder);

/// Where an exported folder's tokenizer and the rest of its config.json come from.
HfWriteOptions hf_write_options(const JobConfig& config);

/// The kinds of initial weights.
enum class InitialKind { None, Nothing, ModelFile, Step, HuggingFace };
struct InitialSource {
  InitialKind kind = InitialKind::None;
  /// The file, or the folder: for Hugging Face's initial_load_path, or else model.hf_assets_path.
  std::filesystem::path path;
};
/// Looks at the files. Nothing: the path holds none of the other kinds.
InitialSource initial_source(const JobConfig& config);

/// Where the run's step-N folders are.
std::filesystem::path steps_folder(const JobConfig& config);

/// The step that completes the run, if its folder holds it and the settings don't ask for an earlier one.
/// Only this process reads the folder.
std::optional<int64_t> end_of_run(const JobConfig& config);
/// Whether rank 0 finds such a step; if so, logs it. Collective over the world.
bool run_has_ended(const JobConfig& config, const dist::World& world);

/// Where a start would begin: "resumes from FOLDER/step-500". Adds to `problems` why it couldn't load that
/// into `parameters`, those of the whole model, or continue its data. Reads headers and samples only, in this
/// process. `checked`: what check_job returned; unset: it failed, so the data aren't compared.
std::string find_start(const JobConfig& config, const std::vector<Parameter>& parameters,
                       const std::optional<CheckedFiles>& checked, std::vector<std::string>& problems);

/// The training data. `tokenizer`: may be null for stored tokens.
data::FeedRequest training_feed(const JobConfig& config,
                                const std::shared_ptr<const data::Tokenizer>& tokenizer);

/// How `launch`'s ranks keep states in the hosts' memory; nullopt: they don't. Throws ConfigError if the
/// settings ask for such states and no launcher restarts the ranks.
std::optional<PeerSettings> peer_settings(const CheckpointSettings& settings, const dist::Launch& launch);

/// Null if checkpoints are off. Collective over the world.
std::unique_ptr<RunCheckpoints> build_checkpoints(const JobConfig& config, const dist::World& world,
                                                  const Meshes& meshes,
                                                  const std::vector<Parameter>& parameters);

// ---- Float8 and MXFP8

struct Gpu {
  std::string name;
  int compute_capability = 0;  ///< 90: 9.0
};

/// A table of the configuration that converts linear layers.
struct ConverterKeys {
  const char* converter = "";  ///< its name in model.converters
  const char* emulate = "";    ///< the key that emulates the hardware units
};

/// How the products of `recipe` run on `gpu`, or on a CPU (nullopt). Throws ConfigError if it has no units
/// for them, unless they are emulated.
float8::Arithmetic choose_arithmetic(const float8::Recipe& recipe, const std::optional<Gpu>& gpu,
                                     bool emulate, const ConverterKeys& keys);

/// Logs which layers of the whole model run in Float8 and why the others don't, and warns of filters that
/// name none. Called by one rank.
void log_float8_layers(const JobConfig& config);

/// Key of the histories in a checkpoint, which may lack them: a run may change its scaling when it resumes.
inline constexpr const char* kDelayedScales = "float8_scales";

/// Updates the scales before each optimizer step; null if none are delayed. Adds them to the checkpoints (may
/// be null), which must not outlive the result.
std::unique_ptr<TrainerPolicy> build_delayed_scales(
    const JobConfig& config, const std::vector<std::unique_ptr<TrainableModel>>& models, const Meshes& meshes,
    RunCheckpoints* checkpoints);

// ---- observers and guards of a run

/// The watchdog's limits until the end of the process's first step, which sets up everything lazy.
dist::WatchdogLimits startup_limits(const CommSettings& comm, const CheckpointSettings& checkpoint);
/// The watchdog's limits after the first step.
dist::WatchdogLimits training_limits(const CommSettings& comm, const CheckpointSettings& checkpoint);

/// The time limit of collectives during the first step: longer than the watchdog's, which knows more about a
/// hang. Without a watchdog it is train_timeout_seconds.
int64_t collective_timeout_s(const CommSettings& comm, const CheckpointSettings& checkpoint);

/// The watchdog of this rank, with the files of [comm]. It has no limits until a RunWatchdog sets them.
std::shared_ptr<dist::Watchdog> make_watchdog(const JobConfig& config, const dist::World& world);

/// The FLOP/s that mfu is relative to: metrics.peak_flops, or the peak of a known device. The known peaks are
/// for bfloat16; a job that multiplies in 8 bits has none, so mfu is N/A, as in TorchTitan.
std::optional<double> job_peak_flops(const JobConfig& config, const std::string& device_name);

/// Dense bfloat16 peak of a device by its name ("NVIDIA H100 PCIe"), in FLOP/s; nullopt for an unknown name.
std::optional<double> peak_flops_of(const std::string& device_name);

/// The limits of a device by its name; for an unknown name, nothing but metrics.peak_flops is known.
DeviceLimits device_limits(const JobConfig& config, const std::string& device_name);

/// Warns when the device's peak isn't known.
DeviceRate device_rate(const JobConfig& config, const Meshes& meshes, at::Device device);

/// Adds the profilers that the settings ask for. Returns the one that writes traces, or null. `log` may be
/// null.
StepProfiler* add_profilers(RunObservers& observers, const JobConfig& config, const dist::World& world,
                            std::vector<nn::AnyRef> models, StructuredLog* log);

}  // namespace titan::train
