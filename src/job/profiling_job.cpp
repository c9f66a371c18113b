#include "job/profiling_job.h"

#include "observe/profiling.h"

namespace titan::train {

void start_memory_history(const JobConfig& config, at::Device device) {
  if (config.profiling.enable_memory_snapshot) record_memory_history(device);
}

StepProfiler* add_profilers(RunObservers& observers, const JobConfig& config, const dist::World& world,
                            const std::vector<std::unique_ptr<TrainableModel>>& models, StructuredLog* log) {
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
                                .log = log};
  for (const auto& model : models) options.models.push_back(model->root());
  auto profiler = std::make_unique<StepProfiler>(std::move(options));
  StepProfiler* const made = profiler.get();
  observers.push_back(std::move(profiler));
  return made;
}

}  // namespace titan::train
