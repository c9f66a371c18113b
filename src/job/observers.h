#pragma once

// Builds what watches and guards a run, from its settings.

#include <memory>

#include "job/job_config.h"
#include "observe/profiling.h"
#include "titan/guard/watchdog.h"
#include "titan/train/trainer.h"

namespace titan::train {

/// The watchdog's limits until the process's first step is over, which sets up everything lazy.
dist::WatchdogLimits startup_limits(const CommSettings& comm, const CheckpointSettings& checkpoint);
/// The watchdog's limits after the first step.
dist::WatchdogLimits training_limits(const CommSettings& comm, const CheckpointSettings& checkpoint);

/// The time limit of collectives during the first step: longer than the watchdog's, which knows more about a
/// hang. Without a watchdog it is train_timeout_seconds.
int64_t collective_timeout_s(const CommSettings& comm, const CheckpointSettings& checkpoint);

/// The watchdog of this rank, with the files of [comm]. It judges nothing until a RunWatchdog sets its limits.
std::shared_ptr<dist::Watchdog> make_watchdog(const JobConfig& config, const dist::World& world);

/// FLOP/s that mfu is a share of: metrics.peak_flops, or the peak of a known device. The known peaks are for
/// bfloat16; for a job that multiplies in 8 bits there is none, so mfu is N/A, as in TorchTitan.
std::optional<double> job_peak_flops(const JobConfig& config, const std::string& device_name);

/// Dense bfloat16 peak of a device by its name ("NVIDIA H100 PCIe"), in FLOP/s; nullopt for an unknown name.
std::optional<double> peak_flops_of(const std::string& device_name);

/// Warns when the device's peak isn't known.
DeviceRate device_rate(const JobConfig& config, const Meshes& meshes, at::Device device);

/// Starts the history of memory snapshots, if the settings want them. Call it before anything that the
/// snapshots should show is allocated.
void start_memory_history(const JobConfig& config, at::Device device);

/// Adds the profilers that the settings ask for. Returns the one that writes traces, or null. `log` may be
/// null.
StepProfiler* add_profilers(RunObservers& observers, const JobConfig& config, const dist::World& world,
                            const std::vector<std::unique_ptr<TrainableModel>>& models, StructuredLog* log);

}  // namespace titan::train
