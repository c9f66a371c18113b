#pragma once

// [profiling]: traces of steps for Perfetto, and memory snapshots for PyTorch's viewer.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <c10/core/Device.h>

#include "nn/trace_labels.h"
#include "observe/structured_log.h"
#include "titan/config/table.h"
#include "titan/nn/hooks.h"
#include "titan/train/run_observer.h"

namespace at {
struct RecordFunction;
}

namespace titan::train {

/// [profiling]
struct ProfilingSettings {
  bool enable_profiling = false;
  std::string save_traces_folder = "profile_traces";  ///< under dump_folder
  int64_t profile_freq = 10;                          ///< steps between traces, and between snapshots
  int64_t profiler_active = 1;  ///< steps in a trace: the last ones of every profile_freq
  int64_t profiler_warmup = 3;  ///< warm-up steps before them, with the profiler set up
  bool enable_memory_snapshot = false;
  std::string save_memory_snapshot_folder = "memory_snapshot";  ///< under dump_folder
};

void describe(config::Table<ProfilingSettings>& table);

enum class ProfileAction { None, WarmUp, Record, RecordAndSave };

/// The profiler's action in `step` (from 1): of every profile_freq steps it records the last profiler_active,
/// after profiler_warmup steps with the profiler set up. It depends only on the step, so that a resumed run
/// profiles the same steps as an uninterrupted one.
ProfileAction profile_action(const ProfilingSettings& settings, int64_t step);

/// Adds names to the stream numbers of `trace`, Kineto's JSON: "stream 20" becomes "stream 20 fsdp gather".
/// Changes nothing if no stream was marked. The pieces make up the text and point into `trace`.
std::vector<std::string_view> with_stream_names(std::string_view trace);

/// Records steps with LibTorch's profiler (Kineto), and writes each window as
/// {folder}/iteration_{step}/rank{rank}_trace.json.gz. Modules have labels only while a window is open. If a
/// trace can't be written, it logs an error and training continues.
class StepProfiler final : public RunObserver {
 public:
  struct Options {
    ProfilingSettings settings;
    std::filesystem::path folder;
    c10::Device device;
    int rank = 0;
    int world_size = 1;
    std::string backend = {};             ///< the world group's backend
    std::vector<nn::AnyRef> models = {};  ///< this rank's stages
    StructuredLog* log = nullptr;         ///< receives a span for each written trace; may be null
  };
  explicit StepProfiler(Options options);
  ~StepProfiler() override;

  /// A large trace takes minutes to write, on the training thread: `watchdog`, which must outlive this
  /// object, sees that as a save.
  void report_writing_to(RunObserver& watchdog) { watchdog_ = &watchdog; }

  void begin(Phase phase, int64_t step) override;
  void end(Phase phase, int64_t step, bool failed) override;

 private:
  void begin_step(int64_t step);
  void start();
  void stop(int64_t step);
  void save(int64_t step);
  void discard() noexcept;

  Options options_;
  RunObserver* watchdog_ = nullptr;
  bool prepared_ = false, recording_ = false;
  std::vector<nn::TraceLabels> labels_;
  std::vector<std::unique_ptr<at::RecordFunction>> phases_;  // the open phases
};

/// Starts recording allocations: a GPU's by LibTorch's allocator, a CPU's of 1 MiB and more by ours. Call it
/// before anything that the snapshots should show is allocated.
void record_memory_history(c10::Device device);

/// Writes {folder}/iteration_{step}/rank{rank}_memory_snapshot.pickle at the end of every `freq`-th step and,
/// if a step runs out of memory, {folder}/iteration_{the step before}_exit/... If a snapshot can't be
/// written, it logs an error and training continues.
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
  int64_t num_out_of_memory_;  // count before training
};

}  // namespace titan::train
