#pragma once

#include <chrono>
#include <cstdint>
#include <optional>

#include <c10/core/Device.h>

#include "titan/train/metrics.h"

namespace titan::train {

/// How fast this rank computes, by the model and its device.
struct DeviceRate {
  double flops_per_token = 0;
  std::optional<double> peak_flops;  ///< of the device, in FLOP/s
  int non_data_parallel_size = 1;    ///< ranks that share a token's work: cp x tp x pp
};

/// Counts tokens and time from one logged step to the next.
class MetricsWindow {
 public:
  MetricsWindow(at::Device device, const DeviceRate& rate) : device_(device), rate_(rate) {}

  /// The training loop starts: time counts from here.
  void start();
  void count_step(int64_t local_tokens);
  void count_data_loading(double seconds) { data_loading_s_ += seconds; }
  /// Of this rank's rows, since it started.
  int64_t local_tokens_seen() const { return local_tokens_seen_; }
  /// They are counted from here: the state is a checkpoint's, which has its own count.
  void forget_tokens_seen() { local_tokens_seen_ = 0; }
  /// Time that isn't the steps' (validation, waiting for a checkpoint).
  void leave_out(double seconds) { left_out_s_ += seconds; }

  /// Fills in rates, times and memory, and starts the next window.
  void close(StepMetrics& metrics);
  void fill_memory(double& gib, double& percent) const;
  /// What a device's allocator tells besides, and a warning when it tells of trouble; its peaks count anew.
  void take_device_memory(StepMetrics& metrics);
  /// A second and device, of tokens of this rank's rows, which cp x tp x pp ranks compute together.
  double rate_of(int64_t local_tokens, double seconds) const;

 private:
  using Clock = std::chrono::steady_clock;
  at::Device device_;
  DeviceRate rate_;
  Clock::time_point start_;
  std::optional<double> startup_s_;  // until it is told
  int64_t steps_ = 0;
  int64_t local_tokens_ = 0;
  int64_t local_tokens_seen_ = 0;
  double data_loading_s_ = 0;
  double left_out_s_ = 0;
  int64_t troubles_ = 0;  // of the allocator, that have been warned of
};

}  // namespace titan::train
