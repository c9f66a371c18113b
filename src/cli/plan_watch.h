#pragma once

// [Note: the plan of a run]
// On GPUs, rank 0 of `titan train` has its own job planned: a child process of lower priority runs `titan plan` with the run's config, because a
// process that trains can't plan: LibTorch asks only once whether there is a GPU. Training doesn't wait for it. When the child has answered, the
// plan is in the run's folder as plan.json, tps is logged in percent of what the plan says, and memory is compared with it: each rank's peak from the
// device, which rank 0 gathers once, and, for `titan report`, what the tensors that live from step to step take (memory.json).

#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include "cli/run_folder.h"
#include "job/job_config.h"
#include "titan/config/load.h"
#include "titan/dist/world.h"
#include "titan/train/run_observer.h"

namespace titan::train {
struct TrainerParts;
}

namespace titan::cli {

/// Throws ConfigError if metrics.plan_device is neither a known device nor a readable file.
void check_plan_device(const train::JobConfig& config, const config::Origins& origins);

/// A rank whose peak of memory from the device isn't as planned.
struct UnplannedPeak {
  int rank = 0;
  double gib = 0;
  PlannedPeak planned = {};
  double difference = 0;  ///< a share of what was planned
  int num_others = 0;     ///< other ranks that aren't as planned
};
/// The rank that differs most from the plan, if by more than 5 %. `peaks_gib`: of all ranks.
std::optional<UnplannedPeak> find_unplanned_peak(const std::vector<PlannedPeak>& planned,
                                                 const std::vector<double>& peaks_gib);

/// Starts the program that plans when the run starts, and then follows it. On other ranks than 0 it only has a part in gathering peaks.
class PlanWatch final : public train::RunObserver {
 public:
  struct Options {
    std::vector<std::string> command;  ///< prints the plan as JSON; empty: there is no plan
    std::filesystem::path file = {};   ///< gets it; an earlier one is removed; empty: on other ranks than 0
    /// All ranks' peaks, by rank, from each one's own; collective. Empty: the logged memory isn't a device's, or nothing is compared.
    std::function<std::vector<double>(double)> gather_peaks = {};
    /// Called by the training thread between a backward and the next step; empty: nothing is measured.
    std::function<LastingMemory()> measure_lasting = {};
  };
  /// `window` gets the planned rate, and outlives this.
  PlanWatch(Options options, train::MetricsWindow& window) : options_(std::move(options)), window_(window) {}

  void begin_after(int64_t step) override;
  void logged(const train::StepMetrics& metrics) override;

 private:
  void make_plan(const std::stop_token& stop);
  void compare_memory() const;
  void write_lasting(int64_t step);

  Options options_;
  train::MetricsWindow& window_;
  std::optional<int64_t> first_step_;  // the first that this process trains
  double peak_gib_ = 0;
  std::vector<double> peaks_gib_;  // all ranks', once they have been gathered, after
  int64_t gathered_step_ = 0;      // this one
  bool is_followed_ = false;       // the window has the plan's rate
  bool compared_ = false;
  std::mutex mutex_;
  std::optional<RunPlan> plan_;  // made by the thread
  std::jthread thread_;          // last: stopped and joined before the members above are destroyed
};

/// Null on other ranks than 0 if memory isn't compared. There is no plan if metrics.plan_device says so, or if it is "auto" and the GPU is
/// unknown. `parts` outlive it.
std::unique_ptr<PlanWatch> build_plan_watch(const train::JobConfig& config, const dist::World& world,
                                            train::TrainerParts& parts);

}  // namespace titan::cli
