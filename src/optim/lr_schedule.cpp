#include "titan/optim/lr_schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "titan/core/error.h"
#include "titan/core/log.h"

namespace titan::optim {

void describe(config::Table<LrSchedulerSettings>& table) {
  using Settings = LrSchedulerSettings;
  table.field("name", &Settings::name,
              "\"warmup_stable_decay\", or a schedule that was registered (docs/extending.md)");
  table.field("warmup_steps", &Settings::warmup_steps, "steps of linear warmup", config::at_least(0));
  table.field("total_steps", &Settings::total_steps, "length of the schedule; unset: training.steps",
              config::at_least(1));
  table.field("decay_ratio", &Settings::decay_ratio,
              "part of the schedule that decays; unset: everything after the warmup", config::in_range(0, 1));
  table.field("decay_type", &Settings::decay_type, "shape of the decay",
              config::one_of({"linear", "sqrt", "cosine"}));
  table.field("min_lr_factor", &Settings::min_lr_factor, "floor of the decay as a part of the peak",
              config::in_range(0, 1));
}

namespace {

int64_t cut(int64_t steps, int64_t limit, const char* name) {
  if (steps > limit)
    log::warning_rank0(titan::str("lr_scheduler: ", name, " of ", steps, " steps is shortened to the ", limit,
                                  " steps that the schedule has left"));
  return std::min(steps, limit);
}

// Falls from 1 at `progress` 0 to 0 at `progress` 1.
double decayed(const std::string& type, double progress) {
  if (type == "sqrt") return 1 - std::sqrt(progress);
  if (type == "cosine") return 0.5 * (1 + std::cos(std::numbers::pi * progress));
  return 1 - progress;
}

// TorchTitan's schedule.
LrFactor warmup_stable_decay(const LrSchedulerSettings& settings, int64_t total) {
  const int64_t warmup_steps = cut(settings.warmup_steps, total, "warmup");
  int64_t decay_steps = total - warmup_steps;
  if (settings.decay_ratio) {
    // nearbyint rounds halves to even, like Python's round().
    const double wanted = std::nearbyint(static_cast<double>(total) * *settings.decay_ratio);
    decay_steps = cut(static_cast<int64_t>(wanted), total - warmup_steps, "decay");
  }
  // The extra step keeps the last step above the floor.
  const int64_t stable_steps = total + 1 - warmup_steps - decay_steps;
  return [=, type = settings.decay_type, floor = settings.min_lr_factor](int64_t step) {
    if (step < warmup_steps) return static_cast<double>(step + 1) / static_cast<double>(warmup_steps);
    const int64_t decaying = step + 1 - warmup_steps - stable_steps;
    if (decaying <= 0) return 1.0;
    const double progress =
        decay_steps > 0 ? static_cast<double>(decaying) / static_cast<double>(decay_steps) : 1;
    return floor + (1 - floor) * decayed(type, std::min(progress, 1.0));
  };
}

}  // namespace

Registry<LrScheduleSpec>& lr_schedules() {
  static Registry<LrScheduleSpec>& registry = *[] {
    auto* made = new Registry<LrScheduleSpec>("learning-rate schedule");
    made->add("warmup_stable_decay", LrScheduleRule<LrSchedulerSettings>{warmup_stable_decay});
    return made;
  }();
  return registry;
}

LrSchedule::LrSchedule(const LrSchedulerSettings& settings, int64_t training_steps) {
  const int64_t total = settings.total_steps.value_or(training_steps);
  TITAN_CHECK(total > 0, "a learning rate schedule needs at least one step, got ", total);
  const LrScheduleSpec& spec = lr_schedules().get(settings.name);
  factor_ = spec.make(spec.args.make(settings).get(), total);
}

}  // namespace titan::optim
