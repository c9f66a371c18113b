#pragma once

// Which steps are profiled: of every profile_freq steps the last profiler_active, after profiler_warmup with
// the profiler set up. A pure function of the step, so that a resumed run goes on as the uninterrupted one.

#include <cstdint>

#include "titan/train/profiling_settings.h"

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
