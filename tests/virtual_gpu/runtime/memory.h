#pragma once

#include "runtime/stream.h"

/// Device memory is memory of the host that is reserved and gets pages when it is first touched.
namespace virtual_gpu {

struct Block {
  size_t bytes = 0;
  int device = 0;
  bool is_pinned_host = false;
  bool is_mapped = false;  ///< by the driver's calls, which also unmap it
  bool has_parts = false;  ///< LibTorch's allocator hands out parts of it
};

/// The block that contains the address, or null. The state's mutex is held.
const Block* find_block(const void* address);
void add_block(const void* address, Block block);
void remove_block(const void* address);

/// Ends the program if a range begins in an allocation and ends after it: in the program's own, or in a part that LibTorch's allocator has
/// handed out. The state's mutex is held.
void check_ends(const Operation& operation);

/// Bytes that copies bring to pinned memory arrive there when the host has synchronized with the copy, and not when it has run. Those of the
/// operations in the clock do now, and those in ranges that another operation of the device reads, or writes. The state's mutex is held.
void deliver(const Clock& known);
void deliver_to(const std::vector<Range>& ranges);

/// Replaces LibTorch's kernels.
void load_kernels();
/// Does that, and watches LibTorch's allocator from its first allocation on.
void begin_allocating();
/// Takes a part of the device's memory; false if there isn't as much left. The state's mutex is held.
bool take_memory(const char* call, int device, size_t bytes);
void return_memory(int device, size_t bytes);

/// Address space of at least this size, zeroed at first use; null if there is none left.
void* reserve(size_t bytes);
void release(void* address, size_t bytes);

}  // namespace virtual_gpu
