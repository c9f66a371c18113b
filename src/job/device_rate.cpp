#include "job/device_rate.h"

#include <array>
#include <string_view>

#include "dist/device_backend.h"
#include "titan/core/error.h"
#include "titan/core/log.h"
#include "titan/float8/recipe.h"
#include "titan/train/metrics.h"

namespace titan::train {

namespace {

struct Peak {
  std::string_view part_of_name;
  double flops;
};

// Dense bf16, from the vendors' data sheets. The first match counts, so a longer name stands before the one
// it contains.
constexpr std::array kPeaks = {
    Peak{"A100", 312e12},     Peak{"H100 NVL", 835e12}, Peak{"H100 PCIe", 756e12}, Peak{"H100", 989e12},
    Peak{"H200", 989e12},     Peak{"H20", 148e12},      Peak{"GB300", 2.5e15},     Peak{"GB200", 2.5e15},
    Peak{"B300", 2.25e15},    Peak{"B200", 2.25e15},    Peak{"MI355X", 2500e12},   Peak{"MI300X", 1300e12},
    Peak{"MI325X", 1300e12},  Peak{"MI250X", 191.5e12}, Peak{"L40S", 362e12},      Peak{"l40s", 362e12},
    Peak{"A6000", 154.85e12},
};

}  // namespace

std::optional<double> peak_flops_of(const std::string& device_name) {
  for (const Peak& peak : kPeaks)
    if (device_name.find(peak.part_of_name) != std::string::npos) return peak.flops;
  return std::nullopt;
}

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
