#include "train/device_rate.h"

#include "titan/core/error.h"
#include "titan/core/log.h"
#include "titan/dist/device_backend.h"
#include "titan/float8/settings.h"
#include "titan/train/metrics.h"

namespace titan::train {

namespace {

bool multiplies_in_8_bits(const JobConfig& config) {
  return config.model.converts(float8::kConverter) || config.model.converts(float8::kMxConverter);
}

}  // namespace

std::optional<double> job_peak_flops(const JobConfig& config, const std::string& device_name) {
  if (config.metrics.peak_flops) return config.metrics.peak_flops;
  if (multiplies_in_8_bits(config)) return std::nullopt;
  return peak_flops_of(device_name);
}

DeviceRate device_rate(const JobConfig& config, const Meshes& meshes, at::Device device) {
  auto* backend = device.is_cpu() ? nullptr : dist::device_backend();
  const std::string name = backend ? backend->device_name(device.index()) : "";
  const DeviceRate rate{
      .flops_per_token = config.spec().flops_per_token(config.args(), config.training.seq_len),
      .peak_flops = job_peak_flops(config, name),
      .non_data_parallel_size = meshes.world.size() / meshes.dp_degree()};
  if (backend && !rate.peak_flops && !multiplies_in_8_bits(config))
    log::warning_rank0(str("no peak FLOPS known of ", name, "; set metrics.peak_flops"));
  return rate;
}

}  // namespace titan::train
