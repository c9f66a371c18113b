#include "titan/optim/lr_schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "titan/core/error.h"
#include "titan/core/log.h"

namespace titan::optim {
namespace {

int64_t cut(int64_t steps, int64_t limit, const char* name) {
  if (steps > limit) {
    log::warning_rank0(
        titan::str(name, " of ", steps, " steps is cut to the ", limit, " that the schedule has for it"));
  }
  return std::min(steps, limit);
}

}  // namespace

LrSchedule::LrSchedule(const LrSchedulerSettings& settings, int64_t training_steps)
    : min_factor_(settings.min_lr_factor) {
  int64_t total = settings.total_steps.value_or(training_steps);
  TITAN_CHECK(total > 0, "a learning rate schedule needs at least one step, got ", total);
  if (settings.decay_type == "sqrt") decay_ = Decay::Sqrt;
  if (settings.decay_type == "cosine") decay_ = Decay::Cosine;
  warmup_steps_ = cut(settings.warmup_steps, total, "lr_scheduler: warmup");
  decay_steps_ = total - warmup_steps_;
  if (settings.decay_ratio) {
    // nearbyint rounds halves to even, as Python's round().
    auto wanted = static_cast<int64_t>(std::nearbyint(static_cast<double>(total) * *settings.decay_ratio));
    decay_steps_ = cut(wanted, total - warmup_steps_, "lr_scheduler: decay");
  }
  // The one step more keeps the last one above the floor.
  stable_steps_ = total + 1 - warmup_steps_ - decay_steps_;
}

double LrSchedule::factor(int64_t step) const {
  if (step < warmup_steps_) return static_cast<double>(step + 1) / static_cast<double>(warmup_steps_);
  int64_t decayed_steps = step + 1 - warmup_steps_ - stable_steps_;
  if (decayed_steps <= 0) return 1;
  double progress =
      decay_steps_ > 0 ? static_cast<double>(decayed_steps) / static_cast<double>(decay_steps_) : 1;
  return min_factor_ + (1 - min_factor_) * decayed(std::min(progress, 1.0));
}

double LrSchedule::decayed(double progress) const {
  switch (decay_) {
    case Decay::Linear:
      return 1 - progress;
    case Decay::Sqrt:
      return 1 - std::sqrt(progress);
    case Decay::Cosine:
      return 0.5 * (1 + std::cos(std::numbers::pi * progress));
  }
  TITAN_INTERNAL_ASSERT(false);
}

}  // namespace titan::optim
