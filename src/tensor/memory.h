#pragma once

// Where the memory of tensors comes from. What lives as long as the model (shards, gradients, optimizer
// state, communication buffers) has pages of its own from the kernel. In `titan train`, the tensors of a
// training step come from an allocator that keeps what is freed. And here is the only code that replaces the
// memory of a parameter: the TensorImpl, and so every handle and every view that autograd saved, stays; its
// storage gets and loses its bytes.

#include <cstddef>
#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

namespace titan {

// ---- straight from the kernel

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

// ---- the tensors of a step

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

/// The bytes of a contiguous `tensor` as one dimension of integers of its elements' size.
at::Tensor bits_of(const at::Tensor& tensor);

// ---- tensors whose memory comes and goes

/// A tensor with these sizes and a storage of zero bytes, as deferred construction makes it and as a freed
/// parameter looks. It works through set_data, allocate and autograd; views of it may be made but not read.
at::Tensor deferred_tensor(at::IntArrayRef sizes, const at::TensorOptions& options);

/// The elements [offset, offset + numel) of the one-dimensional `whole` as a tensor of `sizes`: a leaf of its
/// own that shares storage and version counter with it, whether or not it has memory yet (a deferred tensor
/// has no views).
at::Tensor part_of(const at::Tensor& whole, int64_t offset, at::IntArrayRef sizes);

/// Whether `tensor` has elements but no memory for them.
bool is_deferred(const at::Tensor& tensor);

namespace param_storage {

/// Gives `tensor` memory of its own (uninitialized). Its storage must be its own and empty.
void allocate(const at::Tensor& tensor);
/// Lets `tensor` use part of `owner`'s memory, starting `byte_offset` bytes after owner's first element.
/// `owner` is kept alive until free().
void bind(const at::Tensor& tensor, const at::Tensor& owner, int64_t byte_offset);
/// Gives the memory back; the tensor keeps sizes and dtype. On CUDA the bytes are reused only after the
/// current stream's work so far.
void free(const at::Tensor& tensor);
/// The current size of the tensor's storage.
int64_t bytes(const at::Tensor& tensor);

}  // namespace param_storage

}  // namespace titan
