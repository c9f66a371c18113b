#pragma once

// Memory straight from the kernel, for tensors that live as long as the model: shards, gradients, optimizer
// state, communication buffers.

#include <cstddef>

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

namespace titan {

struct Pages {
  char* begin = nullptr;
  size_t bytes = 0;
};

/// `bytes`, rounded up to whole pages.
size_t whole_pages(size_t bytes);
/// At least `bytes`, zero, as huge pages where possible; blocks that hold one begin at a huge page. Occupies
/// memory when first touched. Throws a std::bad_alloc that names the size.
Pages map_pages(size_t bytes);
void unmap_pages(const Pages& pages);

/// [Note: resident memory]
/// Large blocks on a CPU come straight from the kernel. On malloc's heap, among activations that come and go,
/// they would leave holes that nothing fits in: 300 MiB for a 134M Llama. The pages are zero and occupy
/// memory when they are first touched; the kernel is asked for huge ones, which makes the first touch of a
/// model's weights several times faster. Small blocks and other devices use LibTorch's allocator.

/// At least `bytes`, uninitialized, on `device`.
at::DataPtr resident_memory(size_t bytes, at::Device device);

/// at::zeros in such memory.
at::Tensor resident_zeros(at::IntArrayRef sizes, const at::TensorOptions& options);
/// at::empty in such memory.
at::Tensor resident_empty(at::IntArrayRef sizes, const at::TensorOptions& options);

}  // namespace titan
