#include "titan/train/metrics_window.h"

#include "titan/dist/device_backend.h"
#include "titan/train/process_stats.h"

namespace titan::train {

namespace {

constexpr double kGib = 1024.0 * 1024.0 * 1024.0;

}  // namespace

void MetricsWindow::start() {
  start_ = Clock::now();
  startup_s_ = seconds_since_process_start();
}

void MetricsWindow::count_step(int64_t local_tokens) {
  ++steps_;
  local_tokens_ += local_tokens;
  local_tokens_seen_ += local_tokens;
}

void MetricsWindow::close(StepMetrics& metrics) {
  const double seconds = std::chrono::duration<double>(Clock::now() - start_).count() - left_out_s_;
  const double steps = static_cast<double>(steps_);
  metrics.tps = rate_of(local_tokens_, seconds);
  metrics.tflops = rate_.flops_per_token * metrics.tps * 1e-12;
  if (rate_.peak_flops) metrics.mfu = 100 * rate_.flops_per_token * metrics.tps / *rate_.peak_flops;
  metrics.step_s = seconds / steps;
  metrics.data_loading_s = data_loading_s_ / steps;
  metrics.n_tokens_seen = local_tokens_seen_;
  metrics.startup_s = startup_s_;
  fill_memory(metrics.memory_gib, metrics.memory_percent);

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
  if (auto* backend = dist::device_backend(); backend && device_.type() == backend->device_type()) {
    dist::DeviceMemory memory = backend->memory(device_.index());
    gib = static_cast<double>(memory.peak_reserved_bytes) / kGib;
    total = static_cast<double>(memory.total_bytes) / kGib;
  }
  percent = 100 * gib / total;
}

}  // namespace titan::train
