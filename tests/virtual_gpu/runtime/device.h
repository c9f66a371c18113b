#pragma once

#include <cstddef>

namespace virtual_gpu {

/// Memory of the current profile's device, and the part that is left when the driver's context has been made.
size_t total_bytes();
size_t usable_bytes();

/// How many of the machine's devices CUDA_VISIBLE_DEVICES shows to this process.
int num_visible_devices(size_t num_devices);

}  // namespace virtual_gpu
