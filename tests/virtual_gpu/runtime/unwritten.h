#pragma once

#include "runtime/stream.h"

/// Finds kernels that compute with bytes that nothing has written since LibTorch's allocator handed them out, or that it has taken back. Copies
/// and collectives of such bytes are no fault: they may move a buffer with its padding. The state's mutex is held.
namespace virtual_gpu {

/// The allocator hands out this memory, or takes it back.
void note_unwritten(const void* data, size_t bytes, bool is_free);
/// Reports what an operation that has run has read, and notes what it has written.
void check_reads(const Operation& operation);
/// The memory is returned to the device.
void forget_unwritten(const void* data, size_t bytes);

}  // namespace virtual_gpu
