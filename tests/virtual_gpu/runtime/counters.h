#pragma once

#include "runtime/stream.h"

/// Counts what the device did: launches and bytes by name, times at which the host waited, allocations. Written as JSON to
/// the file in VIRTUAL_GPU_COUNTERS (with %r replaced by RANK) when the program ends.
namespace virtual_gpu {

/// The state's mutex is held, here and below.
void count_operation(const Operation& operation);
void count_host_wait(const std::string& call);
void count_allocation(size_t bytes);

}  // namespace virtual_gpu
