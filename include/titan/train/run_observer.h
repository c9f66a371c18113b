#pragma once

// The interface through which the watchdog, metrics, event log and profiler follow a trainer, and the figures
// of a logged step or validation, with the window that measures speed and memory from one logged step to the
// next. An observer changes nothing about the run; a policy (policy.h) may. A user's observer:
//
//   struct PrintLoss : titan::train::RunObserver {
//     void logged(const titan::train::StepMetrics& metrics) override { std::printf("%g\n", metrics.loss); }
//   };
//   parts.observers.push_back(std::make_unique<PrintLoss>());  // TrainerParts::observers

#include <array>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <vector>

#include <c10/core/Device.h>

namespace titan::train {

/// One logged step. Times are means over the steps since the previous logged one, in seconds.
struct StepMetrics {
  int64_t step = 0;
  double loss = 0;            ///< sum over all valid tokens / their number; NaN: there are no valid tokens
  double max_loss = 0;        ///< largest mean loss of any data-parallel rank
  double grad_norm = 0;       ///< before clipping
  double lr = 0;              ///< used by this step
  double tps = 0;             ///< tokens per second and device
  double tflops = 0;          ///< teraFLOP/s per device
  std::optional<double> mfu;  ///< percent of the device's peak; unset if the peak is unknown
  /// tps in percent of what titan plan says for this device; unset: the run has no plan, or not yet.
  std::optional<double> percent_of_plan = {};
  /// Most memory that the allocator has held since the previous logged step, in GiB (1024^3 bytes). On a CPU:
  /// the kernel's count of peak resident memory since the process started.
  double memory_gib = 0;
  double memory_percent = 0;  ///< memory_gib in percent of the device's memory, or the machine's on a CPU
  /// GPU only, most since the previous logged step: memory in tensors, and with it blocks that were freed
  /// while another stream still used them.
  std::optional<double> allocated_gib = {}, active_gib = {}, active_percent = {};
  /// GPU only, since the process started: cache flushes to find room, and allocations that failed.
  std::optional<int64_t> alloc_retries = {}, num_ooms = {};
  double data_loading_s = 0;
  double step_s = 0;
  int64_t n_tokens_seen = 0;
  int64_t local_valid_tokens = 0;             ///< this step's valid labels on this rank
  int64_t global_valid_tokens = 0;            ///< the same over all ranks
  std::optional<int64_t> skipped_steps = {};  ///< non-finite steps skipped so far; unset: skipping is off
  /// Total time for which checkpoint saves have blocked training since the previous logged step; unset: no
  /// checkpoints.
  std::optional<double> checkpoint_s;
  std::optional<double> startup_s;  ///< seconds from launch to the first step; first logged step only
};

struct ValidationMetrics {
  int64_t step = 0;
  double loss = 0;
  double tps = 0;
  double memory_gib = 0;
  double memory_percent = 0;
};

/// A rank's current activity. All but Load and Finish are part of a Step.
enum class Phase : uint8_t {
  Load,
  Step,
  Data,
  ForwardBackward,
  Optimizer,
  Log,
  Save,
  Validate,
  CheckReplicas,
  Finish
};

inline const char* name_of(Phase phase) {
  constexpr std::array names = {"load", "step", "data",     "forward_backward", "optimizer",
                                "log",  "save", "validate", "check_replicas",   "finish"};
  return names[static_cast<size_t>(phase)];
}

/// Called by the training thread, so a call costs step time: tens of nanoseconds are fine, file accesses are
/// not.
class RunObserver {
 public:
  virtual ~RunObserver() = default;
  /// `step`: the step in progress, from 1; 0 while loading.
  virtual void begin(Phase /*phase*/, int64_t /*step*/) {}
  /// `failed`: an exception leaves the phase.
  virtual void end(Phase /*phase*/, int64_t /*step*/, bool /*failed*/) {}
  /// Called at a start (0: from the beginning) and after a rewind to a checkpoint: the next step is the one
  /// after `step`. Records of later steps, from an earlier run or from before the rewind, are obsolete.
  virtual void begin_after(int64_t /*step*/) {}
  /// A step's figures as rank 0 logs them; called on every rank. If numbers are read late, that is in the next step.
  virtual void logged(const StepMetrics& /*metrics*/) {}
  virtual void validated(const ValidationMetrics& /*metrics*/) {}
  /// This rank's figures for the same observer of all ranks, equally many on each. They travel with the next
  /// exchange between hosts: before a step, in a validation or, if there are any, at the end of the run.
  virtual std::vector<double> figures() const { return {}; }
  /// `of_ranks`: what figures() was on each rank, in the order of ranks. From now on it may be empty.
  virtual void receive_figures(const std::vector<double>& /*of_ranks*/) {}
  /// All ranks have agreed to end the run early, because of this signal (0: for another reason).
  virtual void stopped(int /*signal*/) {}
  /// The run is over: everything logged should be on disk afterwards.
  virtual void flush() {}
};
using RunObservers = std::vector<std::unique_ptr<RunObserver>>;

/// Reports the beginning of a phase to all observers, and in its destructor the end, in reverse order.
class PhaseScope {
 public:
  PhaseScope(const RunObservers& observers, Phase phase, int64_t step)
      : observers_(observers), phase_(phase), step_(step), exceptions_(std::uncaught_exceptions()) {
    for (const auto& observer : observers_) observer->begin(phase_, step_);
  }
  ~PhaseScope() {
    const bool failed = std::uncaught_exceptions() > exceptions_;
    for (auto at = observers_.rbegin(); at != observers_.rend(); ++at) (*at)->end(phase_, step_, failed);
  }
  PhaseScope(const PhaseScope&) = delete;
  PhaseScope& operator=(const PhaseScope&) = delete;

 private:
  const RunObservers& observers_;
  Phase phase_;
  int64_t step_;
  int exceptions_;
};

/// The figures that turn a rank's token rate into FLOP/s and mfu.
struct DeviceRate {
  double flops_per_token = 0;
  std::optional<double> peak_flops;  ///< the device's, in FLOP/s; unset: unknown
  int non_data_parallel_size = 1;    ///< ranks that share the work on a row: rows x tp x pp
};

/// Counts tokens and time from one logged step to the next.
class MetricsWindow {
 public:
  MetricsWindow(at::Device device, const DeviceRate& rate) : device_(device), rate_(rate) {}

  /// Starts the clock, as the training loop starts.
  void start();
  void count_step(int64_t local_tokens);
  /// For the next count_step(): the step before may not have been logged yet.
  void count_data_loading(double seconds) { next_data_loading_s_ += seconds; }
  /// Tokens in this rank's rows, since the count started.
  int64_t local_tokens_seen() const { return local_tokens_seen_; }
  /// Restarts that count, because a checkpoint with its own count was loaded.
  void forget_tokens_seen() { local_tokens_seen_ = 0; }
  /// Excludes time spent outside of steps (validation, waiting for a checkpoint).
  void leave_out(double seconds) { left_out_s_ += seconds; }

  /// From the next window on, tps is also given in percent of this one.
  void set_planned_tps(double tps) { planned_tps_ = tps; }

  /// Fills in rates, times and memory, and starts the next window.
  void close(StepMetrics& metrics);
  void fill_memory(double& gib, double& percent) const;
  /// Tokens per second and device. rows x tp x pp ranks compute a rank's rows together.
  double rate_of(int64_t local_tokens, double seconds) const;

 private:
  /// Also warns if the allocator has run short of memory, and resets the device's peaks.
  void take_device_memory(StepMetrics& metrics);

  using Clock = std::chrono::steady_clock;
  at::Device device_;
  DeviceRate rate_;
  std::optional<double> planned_tps_;
  Clock::time_point start_;
  std::optional<double> startup_s_;  // until it has been logged
  int64_t steps_ = 0;
  int64_t local_tokens_ = 0;
  int64_t local_tokens_seen_ = 0;
  double data_loading_s_ = 0, next_data_loading_s_ = 0;
  double left_out_s_ = 0;
  int64_t num_warned_ = 0;  // allocator retries and failures already warned about
};

}  // namespace titan::train
