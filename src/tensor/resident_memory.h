#pragma once

// Memory straight from the kernel.

#include <cstddef>

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

namespace titan {

struct Pages {
  char* begin = nullptr;
  size_t bytes = 0;
};

size_t whole_pages(size_t bytes);
/// At least `bytes`, zero, beginning at a huge page where it holds one; huge ones are asked for. Takes room
/// when first touched. Throws a std::bad_alloc
/// that says how much it was.
Pages map_pages(size_t bytes);
void unmap_pages(const Pages& pages);

// Memory of what lives as long as the model: shards, gradients, optimizer state, communication buffers.

/// [Note: resident memory]
/// Large blocks on a CPU come straight from the kernel. Among the activations of malloc's heap, which come
/// and go, they would leave holes that nothing fits in: 300 MiB of a 134M Llama. The pages are zero and take
/// room when they are first touched; where the kernel has huge ones they are asked for, which makes the first
/// touch of a model's weights several times faster. Small blocks and other devices use LibTorch's allocator.

/// At least `bytes`, uninitialized, on `device`.
at::DataPtr resident_memory(size_t bytes, at::Device device);

/// As at::zeros.
at::Tensor resident_zeros(at::IntArrayRef sizes, const at::TensorOptions& options);
/// As at::empty.
at::Tensor resident_empty(at::IntArrayRef sizes, const at::TensorOptions& options);

}  // namespace titan
