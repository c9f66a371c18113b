#include "titan/train/run_observer.h"

#include <utility>

#include "core/process.h"
#include "core/units.h"
#include "dist/device_backend.h"
#include "titan/core/error.h"
#include "titan/core/log.h"

namespace titan::train {

namespace {

dist::DeviceBackend* backend_of_device(at::Device device) {
  auto* backend = dist::device_backend();
  return backend && device.type() == backend->device_type() ? backend : nullptr;
}

double gib_of(int64_t bytes) { return static_cast<double>(bytes) / kGiB; }

}  // namespace

void MetricsWindow::start() {
  start_ = Clock::now();
  startup_s_ = seconds_since_launch();
}

void MetricsWindow::count_step(int64_t local_tokens) {
  ++steps_;
  data_loading_s_ += std::exchange(next_data_loading_s_, 0);
  local_tokens_ += local_tokens;
  local_tokens_seen_ += local_tokens;
}

void MetricsWindow::close(StepMetrics& metrics) {
  const double seconds = seconds_since(start_) - left_out_s_;
  const double steps = static_cast<double>(steps_);
  metrics.tps = rate_of(local_tokens_, seconds);
  metrics.tflops = rate_.flops_per_token * metrics.tps * 1e-12;
  if (rate_.peak_flops) metrics.mfu = 100 * rate_.flops_per_token * metrics.tps / *rate_.peak_flops;
  if (planned_tps_) metrics.percent_of_plan = 100 * metrics.tps / *planned_tps_;
  metrics.step_s = seconds / steps;
  metrics.data_loading_s = data_loading_s_ / steps;
  metrics.n_tokens_seen = local_tokens_seen_;
  metrics.startup_s = startup_s_;
  fill_memory(metrics.memory_gib, metrics.memory_percent);
  take_device_memory(metrics);

  start_ = Clock::now();
  startup_s_.reset();
  steps_ = local_tokens_ = 0;
  data_loading_s_ = left_out_s_ = 0;
}

double MetricsWindow::rate_of(int64_t local_tokens, double seconds) const {
  return static_cast<double>(local_tokens) / seconds / rate_.non_data_parallel_size;
}

void MetricsWindow::fill_memory(double& gib, double& percent) const {
  double total = machine_memory_gib();
  gib = peak_resident_gib();
  if (const auto* backend = backend_of_device(device_)) {
    const dist::DeviceMemory memory = backend->memory(device_.index());
    gib = gib_of(memory.peak_reserved_bytes);
    total = gib_of(memory.total_bytes);
  }
  percent = 100 * gib / total;
}

void MetricsWindow::take_device_memory(StepMetrics& metrics) {
  auto* backend = backend_of_device(device_);
  if (!backend) return;
  const dist::DeviceMemory memory = backend->memory(device_.index());
  metrics.allocated_gib = gib_of(memory.peak_allocated_bytes);
  metrics.active_gib = gib_of(memory.peak_active_bytes);
  metrics.active_percent = 100 * gib_of(memory.peak_active_bytes) / gib_of(memory.total_bytes);
  metrics.alloc_retries = memory.allocation_retries;
  metrics.num_ooms = memory.num_out_of_memory;
  if (const int64_t num = memory.allocation_retries + memory.num_out_of_memory; num > num_warned_) {
    num_warned_ = num;
    log::warning(str("step ", metrics.step, ": the allocator of ", device_.str(), " has flushed its cache ",
                     memory.allocation_retries, " times to find room, and ", memory.num_out_of_memory,
                     " requests failed: the device is short of memory, which slows training down"));
  }
  backend->reset_peak_memory(device_.index());
}

}  // namespace titan::train
