#pragma once

#include <cstddef>

namespace virtual_gpu {

/// Memory of the current profile's device, and the part that is left when the driver's context has been made.
size_t total_bytes();
size_t usable_bytes();

}  // namespace virtual_gpu
