#pragma once

// The learning rate over a run, and the registry of schedules.
//
//   titan::optim::LrSchedule schedule({.warmup_steps = 100}, /*training_steps=*/5000);
//   optimizer.set_lr_factor(schedule.factor(step));

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "titan/optim/optimizer.h"

namespace titan::optim {

/// [lr_scheduler]. A registered schedule's other settings are in [lr_scheduler.args].
struct LrSchedulerSettings {
  std::string name = "warmup_stable_decay";  ///< an entry of lr_schedules()
  int64_t warmup_steps = 200;
  std::optional<int64_t> total_steps;  ///< length of the schedule; unset: training.steps
  std::optional<double> decay_ratio;   ///< fraction of total_steps that decays; unset: all after the warmup
  std::string decay_type = "linear";
  double min_lr_factor = 0;  ///< floor of the decay, as a fraction of the peak
  /// [lr_scheduler.args]: the Args that the schedule was registered with; null: their defaults.
  std::shared_ptr<const void> args = {};

  /// Keys that every schedule reads.
  static constexpr std::array kSharedKeys = {"name", "total_steps"};
};
void describe(config::Table<LrSchedulerSettings>& table);

/// The factor on the peak learning rate at a 0-based step. A pure function, so there is no state to save.
using LrFactor = std::function<double(int64_t step)>;

/// A schedule. Args is the struct of its settings, with a `describe(config::Table<Args>&)` beside it, whose
/// fields are the keys in [lr_scheduler.args]; or LrSchedulerSettings, to read [lr_scheduler] itself.
template <class Args>
struct LrScheduleRule {
  std::function<LrFactor(const Args&, int64_t total_steps)> make;
};

/// A registered schedule with its Args erased.
class LrScheduleSpec {
 public:
  template <class Args>
  LrScheduleSpec(LrScheduleRule<Args> rule)  // NOLINT(google-explicit-constructor): for Registry::add
      : args(RegisteredArgs<LrSchedulerSettings>::of<Args>()),
        make([make = std::move(rule.make)](const void* args, int64_t total_steps) {
          return make(*static_cast<const Args*>(args), total_steps);
        }) {}

  RegisteredArgs<LrSchedulerSettings> args;
  std::function<LrFactor(const void* args, int64_t total_steps)> make;
};

/// The schedules that lr_scheduler.name may name: "warmup_stable_decay" (linear warmup, a stable part at the
/// peak, decay to a floor), and schedules that users add:
///
///   titan::optim::lr_schedules().add("inverse_sqrt", LrScheduleRule<InverseSqrtArgs>{inverse_sqrt});
Registry<LrScheduleSpec>& lr_schedules();

class LrSchedule {
 public:
  /// `training_steps` is the schedule's length if total_steps isn't set. A warmup or decay that doesn't fit
  /// is shortened, with a warning on rank 0, as in TorchTitan. Throws ConfigError for an unknown schedule.
  LrSchedule(const LrSchedulerSettings& settings, int64_t training_steps);

  /// The factor on the peak learning rate at 0-based `step`; the floor after the end of the schedule.
  double factor(int64_t step) const { return factor_(step); }

 private:
  LrFactor factor_;
};

}  // namespace titan::optim
