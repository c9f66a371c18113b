#pragma once

// The text forms of metrics: TorchTitan's console line, and a JSON object per row.

#include <cstdint>
#include <optional>
#include <string>

#include "titan/train/run_observer.h"

namespace titan::train {

/// Two spaces between fields; ANSI colors when `color`.
std::string console_line(const StepMetrics& metrics, bool color);
std::string console_line(const ValidationMetrics& metrics, bool color);

/// One object without a newline; floats in the shortest form that reads back to the same double.
std::string json_line(const StepMetrics& metrics);
std::string json_line(const ValidationMetrics& metrics);

/// "  42% 0:01:15 left"
std::string progress(int64_t step, int64_t total_steps, double seconds_left);

/// Estimates the time left from the pace of the steps after the first one, which pays for start-up.
class RemainingTime {
 public:
  explicit RemainingTime(int64_t total_steps) : total_steps_(total_steps) {}

  /// `step` ended at `now_s`, of any clock. None at the first call.
  std::optional<double> seconds_left(int64_t step, double now_s);

 private:
  int64_t total_steps_;
  int64_t first_step_ = -1;
  double first_s_ = 0;
};

}  // namespace titan::train
