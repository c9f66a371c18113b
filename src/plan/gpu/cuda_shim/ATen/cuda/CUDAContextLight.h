#pragma once

#include <cuda_runtime_api.h>

#include <c10/core/Device.h>

#include "plan/gpu/planned_gpu.h"

namespace at::cuda {

inline const cudaDeviceProp* getDeviceProperties(c10::DeviceIndex /*index*/) {
  static thread_local cudaDeviceProp properties;
  const titan::plan::DeviceSpec& device = titan::plan::PlannedGpu::get().device();
  properties = {.major = static_cast<int>(device.compute_capability / 10),
                .minor = static_cast<int>(device.compute_capability % 10),
                .multiProcessorCount = static_cast<int>(device.multiprocessors)};
  return &properties;
}

}  // namespace at::cuda
