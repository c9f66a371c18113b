#pragma once

#include <cuda.h>

#include "runtime/virtual_gpu.h"

namespace virtual_gpu {

/// The driver's function of this name; one that returns CUDA_ERROR_NOT_SUPPORTED if the virtual driver lacks it.
void* driver_function(const char* name);

}  // namespace virtual_gpu
