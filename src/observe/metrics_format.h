#pragma once

// The formats of metrics: TorchTitan's console line, a JSON object per row, and TensorBoard's event files,
// which are TFRecords (length and data, each with a masked CRC-32C) of `tensorflow.Event` messages.
// https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/util/event.proto

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/durable.h"
#include "titan/train/run_observer.h"

namespace titan::train {

/// Formats as printf does, up to 127 characters.
template <class... Args>
std::string formatted(const char* format, Args... args) {
  char text[128];
  const int length = std::snprintf(text, sizeof text, format, args...);
  return std::string(text, static_cast<size_t>(std::min<int>(length, sizeof text - 1)));
}

/// Two spaces between fields; ANSI colors when `color`.
std::string console_line(const StepMetrics& metrics, bool color);
std::string console_line(const ValidationMetrics& metrics, bool color);

/// One object without a newline; floats in the shortest form that reads back to the same double.
std::string json_line(const StepMetrics& metrics);
std::string json_line(const ValidationMetrics& metrics);

/// "  42% 0:01:15 left"
std::string progress(int64_t step, int64_t total_steps, double seconds_left);

/// Estimates the time left from the pace of the steps after the first one, which includes start-up.
class RemainingTime {
 public:
  explicit RemainingTime(int64_t total_steps) : total_steps_(total_steps) {}

  /// `step` ended at `now_s`, a time of any clock. nullopt at the first call.
  std::optional<double> seconds_left(int64_t step, double now_s);

 private:
  int64_t total_steps_;
  int64_t first_step_ = -1;
  double first_s_ = 0;
};

/// Appends scalars to one event file in `folder`. Throws Error that names the file if it can't be written.
class EventFileWriter {
 public:
  explicit EventFileWriter(const std::filesystem::path& folder);

  /// One event with all `scalars` (tag, value) of a step. TensorBoard keeps values as float32.
  void write(int64_t step, const std::vector<std::pair<std::string, double>>& scalars);
  void sync() { file_.sync(); }
  const std::filesystem::path& path() const { return file_.path(); }

 private:
  void append_record(const std::string& event);

  AppendFile file_;
};

}  // namespace titan::train
