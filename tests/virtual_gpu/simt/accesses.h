#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "runtime/virtual_gpu.h"

/// Reads and writes of the running kernel. Kernels are compiled with -fsanitize=thread, which puts a call before each access, and
/// accesses.cpp has these calls in place of a sanitizer's. It finds accesses outside any allocation, reads of shared memory that nothing
/// has written, and races: two threads access the same bytes, one writes, and no barrier of their block is between.
namespace virtual_gpu::simt {

void begin_kernel(const char* name);
void begin_block();
/// All threads of the block have come to a barrier.
void pass_barrier();

/// From here on, this thread runs the thread of the block with this index, whose stack these bytes are; or none again.
void watch(uint32_t thread, const char* stack, size_t stack_bytes);
void stop_watching();

Accessed end_kernel();

}  // namespace virtual_gpu::simt
