#pragma once

// The only code that replaces the memory of a parameter. The TensorImpl, and so every handle and every view
// that autograd saved, stays; its storage gets and loses its bytes.

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace titan {

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
