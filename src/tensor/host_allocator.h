#pragma once

// Host memory for the tensors of a training step.

#include <cstddef>

namespace titan {

/// [Note: host allocator]
/// A step asks for the same large blocks again and again. malloc either gives each back to the kernel, which
/// hands out zeroed pages one fault at a time (5 % of a step), or keeps all in one heap, where a third of the
/// activations' size is lost between blocks. This allocator maps blocks of 1 MiB or more each for itself,
/// with huge pages, keeps freed ones, and gives them to the next request of about their size. What it keeps
/// is bounded: with a block's mapping all would exceed what was in use at the same time at most, by more than
/// a sixteenth and 64 MiB, the longest unused ones go back first. Smaller blocks are malloc's.

/// Makes it LibTorch's allocator of the CPU, for good. Tensors that exist already keep their memory.
void install_host_allocator();

/// Of the blocks of 1 MiB and more.
struct HostMemoryStats {
  size_t in_use_bytes = 0;
  size_t kept_bytes = 0;  ///< free, mapped
  size_t peak_in_use_bytes = 0;
  size_t num_mappings = 0;  ///< made since the start
};
HostMemoryStats host_memory_stats();

}  // namespace titan
