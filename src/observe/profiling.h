#pragma once

// Which steps are profiled: of every profile_freq steps the last profiler_active, after profiler_warmup with
// the profiler set up. A pure function of the step, so that a resumed run goes on as the uninterrupted one.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include <c10/core/Device.h>

#include "nn/trace_labels.h"
#include "titan/nn/hooks.h"
#include "titan/observe/structured_log.h"
#include "observe/profiling_settings.h"
#include "titan/train/run_observer.h"

namespace titan::train {

enum class ProfileAction { None, WarmUp, Record, RecordAndSave };

/// Of `step`, from 1.
inline ProfileAction profile_action(const ProfilingSettings& settings, int64_t step) {
  const int64_t left = settings.profile_freq - 1 - (step - 1) % settings.profile_freq;  // to the window's end
  if (left == 0) return ProfileAction::RecordAndSave;
  if (left < settings.profiler_active) return ProfileAction::Record;
  if (left < settings.profiler_active + settings.profiler_warmup) return ProfileAction::WarmUp;
  return ProfileAction::None;
}

}  // namespace titan::train

namespace at {

// [profiling] enable_profiling: traces of steps by LibTorch's profiler (Kineto).

struct RecordFunction;
}  // namespace at

namespace titan::train {

/// Records the steps that profile_schedule.h names and writes each window as
/// {folder}/iteration_{step}/rank{rank}_trace.json.gz. Modules have labels while a window is open and at no
/// other time. A trace that can't be written is told of in the log, and training goes on.
class StepProfiler final : public RunObserver {
 public:
  struct Options {
    ProfilingSettings settings;
    std::filesystem::path folder;
    c10::Device device;
    int rank = 0;
    int world_size = 1;
    std::string backend = {};             ///< of the world's group
    std::vector<nn::AnyRef> models = {};  ///< this rank's stages
    StructuredLog* log = nullptr;         ///< gets a span for each trace that is written; may be null
  };
  explicit StepProfiler(Options options);
  ~StepProfiler() override;

  /// A large trace takes minutes to write, in the training thread. `watchdog`, which outlives this object, is
  /// told of it as of a save.
  void tell_of_writing(RunObserver& watchdog) { watchdog_ = &watchdog; }

  void begin(Phase phase, int64_t step) override;
  void end(Phase phase, int64_t step, bool failed) override;

 private:
  void begin_step(int64_t step);
  void prepare();
  void start();
  void stop(int64_t step);
  void save(int64_t step);
  void discard() noexcept;

  Options options_;
  RunObserver* watchdog_ = nullptr;
  bool prepared_ = false, recording_ = false;
  std::vector<nn::TraceLabels> labels_;
  std::vector<std::unique_ptr<at::RecordFunction>> phases_;  // open ones
};

// [profiling] enable_memory_snapshot: what PyTorch's memory viewer (pytorch.org/memory_viz) loads.

/// From now on allocations are noted: a GPU's by LibTorch's allocator, a CPU's of 1 MiB and more by ours.
void record_memory_history(c10::Device device);

/// Writes {folder}/iteration_{step}/rank{rank}_memory_snapshot.pickle at the end of every `freq`-th step;
/// and, when memory runs out in a step, {folder}/iteration_{the step before}_exit/... What can't be written
/// is told of in the log, and training goes on.
class MemorySnapshots final : public RunObserver {
 public:
  struct Options {
    std::filesystem::path folder;
    int64_t freq = 10;
    c10::Device device;
    int rank = 0;
  };
  explicit MemorySnapshots(Options options);

  void end(Phase phase, int64_t step, bool failed) override;

 private:
  void write(const std::filesystem::path& iteration) const;

  Options options_;
  int64_t num_out_of_memory_;  // before training
};

}  // namespace titan::train
