#pragma once

// The sources of tensors' memory. Tensors that live as long as the model (shards, gradients, optimizer state,
// communication buffers) get their own pages from the kernel. In `titan train`, the tensors of a training
// step come from an allocator that keeps freed blocks. This is also the only code that replaces a parameter's
// memory: its storage gets and loses its bytes, while the TensorImpl, and so every handle and every view that
// autograd saved, stays.

#include <cstddef>
#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

namespace titan {

// ---- straight from the kernel

/// [Note: resident memory]
/// Large blocks on a CPU come directly from the kernel. On malloc's heap, among short-lived activations, they
/// would leave holes that no activation fits in: 300 MiB for a 134M Llama. The pages are zero and occupy
/// memory when they are first touched. Huge pages are requested, which makes the first touch of a model's
/// weights several times faster. Small blocks and other devices use LibTorch's allocator.

/// Allocates at least `bytes`, uninitialized, on `device`.
at::DataPtr resident_memory(size_t bytes, at::Device device);

/// at::zeros in such memory.
at::Tensor resident_zeros(at::IntArrayRef sizes, const at::TensorOptions& options);
/// at::empty in such memory.
at::Tensor resident_empty(at::IntArrayRef sizes, const at::TensorOptions& options);

// ---- the tensors of a step

/// [Note: host allocator]
/// Every step allocates the same large blocks. malloc either returns each to the kernel, which provides
/// zeroed pages one fault at a time (5 % of a step), or keeps all in one heap, where a third of the
/// activations' size is lost between blocks. This allocator maps each block of 1 MiB or more separately, with
/// huge pages, keeps freed blocks, and uses them for the next request of about their size. The kept memory is
/// bounded: if a new mapping would bring the total above the highest use so far plus a sixteenth and 64 MiB,
/// the blocks unused longest are unmapped first. Smaller blocks come from malloc.

/// Makes the host allocator LibTorch's CPU allocator until the process ends. Existing tensors keep their
/// memory.
void install_host_allocator();

/// Counts of blocks of 1 MiB and more.
struct HostMemoryStats {
  size_t in_use_bytes = 0;
  size_t kept_bytes = 0;  ///< free but mapped
  size_t peak_in_use_bytes = 0;
  size_t num_mappings = 0;  ///< since the start
};
HostMemoryStats host_memory_stats();

/// The bytes of a contiguous `tensor` as a one-dimensional tensor of integers with its elements' size.
at::Tensor bits_of(const at::Tensor& tensor);

// ---- tensors whose memory comes and goes

/// A tensor with these sizes and a storage of zero bytes, as for deferred construction or after a parameter
/// is freed. It can be used with set_data, allocate and autograd; views of it may be made but not read.
at::Tensor deferred_tensor(at::IntArrayRef sizes, const at::TensorOptions& options);

/// The elements [offset, offset + numel) of the one-dimensional `whole` as a tensor of `sizes`. It is a
/// separate leaf that shares storage and version counter with `whole`, whether or not that has memory yet (a
/// deferred tensor has no views).
at::Tensor part_of(const at::Tensor& whole, int64_t offset, at::IntArrayRef sizes);

/// Whether `tensor` has elements but no memory for them.
bool is_deferred(const at::Tensor& tensor);

namespace param_storage {

/// Gives `tensor` its own memory (uninitialized). Its storage must be empty and not shared.
void allocate(const at::Tensor& tensor);
/// Lets `tensor` use part of `owner`'s memory, starting `byte_offset` bytes after owner's first element.
/// `tensor` keeps `owner`'s memory alive until free().
void bind(const at::Tensor& tensor, const at::Tensor& owner, int64_t byte_offset);
/// Frees the memory; the tensor keeps sizes and dtype. On CUDA the bytes are reused only after the current
/// stream's work so far.
void free(const at::Tensor& tensor);
/// The current size of the tensor's storage.
int64_t bytes(const at::Tensor& tensor);

}  // namespace param_storage

}  // namespace titan
