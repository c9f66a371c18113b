#pragma once

// How fast a job's devices compute, for tflops and mfu.

#include <optional>
#include <string>

#include <c10/core/Device.h>

#include "job/job_config.h"
#include "titan/train/metrics_window.h"
#include "titan/train/parallel_dims.h"

namespace titan::train {

/// FLOP/s that mfu is a share of: metrics.peak_flops, else what is known of devices of this name. The tables
/// hold peaks of bf16, so that of a job whose products are in 8 bits none is known: mfu is N/A there, as in
/// TorchTitan.
std::optional<double> job_peak_flops(const JobConfig& config, const std::string& device_name);

/// Warns where the device's peak isn't known.
DeviceRate device_rate(const JobConfig& config, const Meshes& meshes, at::Device device);

}  // namespace titan::train
