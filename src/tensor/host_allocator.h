#pragma once

// An allocator of host memory for the tensors of a training step.

#include <cstddef>

namespace titan {

/// [Note: host allocator]
/// A step asks for the same large blocks again and again. malloc either gives each back to the kernel, which
/// hands out zeroed pages one fault at a time (5 % of a step), or keeps all in one heap, where a third of the
/// activations' size is lost between blocks. This allocator maps each block of 1 MiB or more separately, with
/// huge pages, keeps freed ones, and gives them to the next request of about their size. It keeps a bounded
/// amount: if a new mapping would bring the total above the highest use so far plus a sixteenth and 64 MiB,
/// the longest unused blocks go back first. Smaller blocks are malloc's.

/// Makes it LibTorch's CPU allocator until the process ends. Existing tensors keep their memory.
void install_host_allocator();

/// Counts of blocks of 1 MiB and more.
struct HostMemoryStats {
  size_t in_use_bytes = 0;
  size_t kept_bytes = 0;  ///< free but mapped
  size_t peak_in_use_bytes = 0;
  size_t num_mappings = 0;  ///< since the start
};
HostMemoryStats host_memory_stats();

}  // namespace titan
