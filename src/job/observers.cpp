// Observers and guards of a run: time limits of the watchdog, the device's peak for MFU, profilers.

#include <algorithm>
#include <array>
#include <string_view>
#include <vector>

#include <ATen/Context.h>

#include "dist/device_backend.h"
#include "job/build.h"
#include "titan/core/error.h"
#include "titan/core/log.h"
#include "titan/float8/recipe.h"

namespace titan::train {

namespace {

using dist::TimeLimit;
using std::chrono::seconds;

// The save's own error should come first: it names the rank and the file.
constexpr int64_t kAfterCheckpointer = 60;
// The watchdog checks at least every two seconds, and knows more than a collective that fails.
constexpr int64_t kAfterWatchdog = 60;

TimeLimit limit(int64_t time_s, std::string setting) { return {seconds(time_s), std::move(setting)}; }

TimeLimit longer(const TimeLimit& a, const TimeLimit& b) { return a.time >= b.time ? a : b; }

TimeLimit sum_of(const TimeLimit& a, const TimeLimit& b) {
  return {a.time + b.time, a.setting + " + " + b.setting};
}

TimeLimit checkpoint_limit(const CommSettings& comm, const CheckpointSettings& checkpoint) {
  if (comm.checkpoint_timeout_seconds)
    return limit(*comm.checkpoint_timeout_seconds, "comm.checkpoint_timeout_seconds");
  return limit(checkpoint.timeout_seconds + kAfterCheckpointer, "checkpoint.timeout_seconds + 60 s");
}

}  // namespace

dist::WatchdogLimits training_limits(const CommSettings& comm, const CheckpointSettings& checkpoint) {
  dist::WatchdogLimits limits;
  limits.data = limit(comm.data_timeout_seconds, "comm.data_timeout_seconds");
  limits.compute = limit(comm.train_timeout_seconds, "comm.train_timeout_seconds");
  limits.checkpoint = checkpoint_limit(comm, checkpoint);
  limits.validation = sum_of(limits.compute, limits.data);  // it loads data and computes
  return limits;
}

dist::WatchdogLimits startup_limits(const CommSettings& comm, const CheckpointSettings& checkpoint) {
  dist::WatchdogLimits limits = training_limits(comm, checkpoint);
  const TimeLimit init = limit(comm.init_timeout_seconds, "comm.init_timeout_seconds");
  limits.data = longer(init, limits.data);
  limits.compute = init;
  limits.checkpoint = longer(init, limits.checkpoint);
  limits.validation = sum_of(init, limits.data);
  return limits;
}

int64_t collective_timeout_s(const CommSettings& comm, const CheckpointSettings& checkpoint) {
  if (!comm.watchdog) return comm.train_timeout_seconds;
  const dist::WatchdogLimits limits = startup_limits(comm, checkpoint);
  const auto longest =
      std::max({limits.data.time, limits.compute.time, limits.checkpoint.time, limits.validation.time});
  return std::chrono::duration_cast<seconds>(longest).count() + kAfterWatchdog;
}

std::shared_ptr<dist::Watchdog> make_watchdog(const JobConfig& config, const dist::World& world) {
  const CommSettings& comm = config.comm;
  dist::WatchdogOptions options;
  options.judges = false;
  options.folder = std::filesystem::path(config.job.dump_folder) / comm.save_traces_folder;
  if (comm.trace_buf_size > 0) options.record_prefix = comm.save_traces_file_prefix;
  options.computing_is_progress = world.device().is_cpu();
  return std::make_shared<dist::Watchdog>(world, std::move(options));
}

namespace {

struct Peak {
  std::string_view part_of_name;
  double flops;                           // bfloat16
  double bytes_per_s = 0;                 // the memory's bandwidth
  double float8 = 0, tf32 = 0, fp32 = 0;  // other FLOP/s; 0: isn't needed yet, or there are no such units
};

// Dense, from the vendors' data sheets. The first match counts, so a longer name comes before a name that it
// contains. Data sheets of the GPUs that have a memory bandwidth here (they state sparse figures, twice these):
// https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-nvidia-us-2188504-web.pdf
// https://resources.nvidia.com/en-us-gpu-resources/h100-datasheet-24306
// https://resources.nvidia.com/en-us-gpu-resources/hpc-datasheet-sc23 (H200)
// https://resources.nvidia.com/en-us-blackwell-architecture/datasheet (HGX B200; GB200)
constexpr std::array kPeaks = {
    Peak{"A100-SXM4-40GB", 312e12, 1.555e12, 0, 156e12, 19.5e12},
    Peak{"A100-PCIE-40GB", 312e12, 1.555e12, 0, 156e12, 19.5e12},
    Peak{"A100 80GB PCIe", 312e12, 1.935e12, 0, 156e12, 19.5e12},
    Peak{"A100", 312e12, 2.039e12, 0, 156e12, 19.5e12},
    Peak{"H100 NVL", 835e12, 3.9e12, 1671e12, 418e12, 60e12},
    Peak{"H100 PCIe", 756e12, 2.0e12, 1513e12, 378e12, 51e12},
    Peak{"H100", 989e12, 3.35e12, 1979e12, 494e12, 67e12},
    Peak{"H200", 989e12, 4.8e12, 1979e12, 494e12, 67e12},
    Peak{"H20", 148e12},
    Peak{"GB300", 2.5e15},
    Peak{"GB200", 2.5e15, 8.0e12, 5e15, 1.25e15, 80e12},
    Peak{"B300", 2.25e15},
    Peak{"B200", 2.25e15, 7.7e12, 4.5e15, 1.1e15, 75e12},
    Peak{"MI355X", 2500e12},
    Peak{"MI300X", 1300e12},
    Peak{"MI325X", 1300e12},
    Peak{"MI250X", 191.5e12},
    Peak{"L40S", 362e12},
    Peak{"l40s", 362e12},
    Peak{"A6000", 154.85e12},
};

const Peak* peak_of(const std::string& device_name) {
  const auto found = std::find_if(kPeaks.begin(), kPeaks.end(), [&](const Peak& peak) {
    return device_name.find(peak.part_of_name) != std::string::npos;
  });
  return found == kPeaks.end() ? nullptr : &*found;
}

bool multiplies_in_8_bits(const JobConfig& config) {
  return config.model.converts(float8::kConverter) || config.model.converts(float8::kMxConverter);
}

}  // namespace

std::optional<double> peak_flops_of(const std::string& device_name) {
  const Peak* const peak = peak_of(device_name);
  return peak ? std::optional(peak->flops) : std::nullopt;
}

DeviceLimits device_limits(const JobConfig& config, const std::string& device_name) {
  DeviceLimits limits{.source = "unknown device " + device_name, .flops = {}};
  const auto add = [&](at::ScalarType dtype, double flops) {
    if (flops > 0) limits.flops[dtype] = flops;
  };
  if (const Peak* const peak = peak_of(device_name)) {
    limits.source = "data sheet of " + device_name;
    limits.bytes_per_s = peak->bytes_per_s;
    for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) add(dtype, peak->flops);
    for (const at::ScalarType dtype : {at::kFloat8_e4m3fn, at::kFloat8_e5m2}) add(dtype, peak->float8);
    add(at::kFloat, at::globalContext().allowTF32CuBLAS() ? peak->tf32 : peak->fp32);
  }
  if (const auto set = config.metrics.peak_flops) {
    const bool is_8_bit = multiplies_in_8_bits(config);
    for (const at::ScalarType dtype :
         is_8_bit ? std::vector{at::kFloat8_e4m3fn, at::kFloat8_e5m2} : std::vector{at::kBFloat16, at::kHalf})
      limits.flops[dtype] = *set;
    limits.source += ", metrics.peak_flops";
  }
  return limits;
}

std::optional<double> job_peak_flops(const JobConfig& config, const std::string& device_name) {
  if (config.metrics.peak_flops) return config.metrics.peak_flops;
  return multiplies_in_8_bits(config) ? std::nullopt : peak_flops_of(device_name);
}

DeviceRate device_rate(const JobConfig& config, const Meshes& meshes, at::Device device) {
  auto* backend = device.is_cpu() ? nullptr : dist::device_backend();
  const std::string name = backend ? backend->device_name(device.index()) : "";
  const DeviceRate rate{
      .flops_per_token = config.spec().flops_per_token(config.args(), config.training.seq_len),
      .peak_flops = job_peak_flops(config, name),
      .non_data_parallel_size = meshes.world.size() / meshes.dp_degree()};
  if (backend && !rate.peak_flops && !multiplies_in_8_bits(config))
    log::warning_rank0(str("the peak FLOPS of ", name, " are unknown; set metrics.peak_flops"));
  return rate;
}

StepProfiler* add_profilers(RunObservers& observers, const JobConfig& config, const dist::World& world,
                            std::vector<nn::AnyRef> models, StructuredLog* log) {
  const ProfilingSettings& settings = config.profiling;
  const std::filesystem::path dump_folder = config.job.dump_folder;
  if (settings.enable_memory_snapshot)
    observers.push_back(std::make_unique<MemorySnapshots>(
        MemorySnapshots::Options{.folder = dump_folder / settings.save_memory_snapshot_folder,
                                 .freq = settings.profile_freq,
                                 .device = world.device(),
                                 .rank = world.rank()}));
  if (!settings.enable_profiling) return nullptr;
  StepProfiler::Options options{.settings = settings,
                                .folder = dump_folder / settings.save_traces_folder,
                                .device = world.device(),
                                .rank = world.rank(),
                                .world_size = world.size(),
                                .backend = world.backend(),
                                .models = std::move(models),
                                .log = log};
  auto profiler = std::make_unique<StepProfiler>(std::move(options));
  StepProfiler* const made = profiler.get();
  observers.push_back(std::move(profiler));
  return made;
}

}  // namespace titan::train
