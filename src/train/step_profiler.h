#pragma once

// [profiling] enable_profiling: traces of steps by LibTorch's profiler (Kineto).

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include <c10/core/Device.h>

#include "titan/nn/any_ref.h"
#include "titan/nn/trace_labels.h"
#include "titan/train/profiling_settings.h"
#include "titan/train/run_observer.h"
#include "titan/train/structured_log.h"

namespace at {
struct RecordFunction;
}

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

}  // namespace titan::train
