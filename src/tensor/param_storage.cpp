#include "tensor/param_storage.h"

#include <ATen/ops/empty.h>
#include <c10/core/StorageImpl.h>
#include <torch/csrc/autograd/variable.h>

#include "tensor/resident_memory.h"
#include "titan/core/error.h"

namespace titan {

namespace {

c10::StorageImpl* storage_impl(const at::Tensor& tensor) { return tensor.storage().unsafeGetStorageImpl(); }

// A DataPtr whose context is a counted reference on the owner's storage: keeps it alive without an allocation
// of its own.
void release_owner(void* context) {
  c10::intrusive_ptr<c10::StorageImpl>::reclaim(static_cast<c10::StorageImpl*>(context));
}

int64_t bytes_needed(const at::Tensor& tensor) {
  return tensor.numel() * static_cast<int64_t>(tensor.element_size());
}

}  // namespace

at::Tensor deferred_tensor(at::IntArrayRef sizes, const at::TensorOptions& options) {
  at::Tensor tensor = at::empty({0}, options);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

at::Tensor part_of(const at::Tensor& whole, int64_t offset, at::IntArrayRef sizes) {
  TITAN_INTERNAL_ASSERT(
      whole.dim() == 1 && offset >= 0 && offset + c10::multiply_integers(sizes) <= whole.numel(), "part [",
      offset, ", +", c10::multiply_integers(sizes), ") of ", whole.numel(), " elements");
  at::Tensor part =
      at::detail::make_tensor<c10::TensorImpl>(c10::Storage(whole.storage()), whole.key_set(), whole.dtype());
  part.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  part.unsafeGetTensorImpl()->set_storage_offset(whole.storage_offset() + offset);
  torch::autograd::impl::set_version_counter(part, torch::autograd::impl::version_counter(whole));
  return part;
}

bool is_deferred(const at::Tensor& tensor) { return tensor.numel() > 0 && tensor.storage().nbytes() == 0; }

namespace param_storage {

void allocate(const at::Tensor& tensor) {
  c10::StorageImpl* storage = storage_impl(tensor);
  TITAN_INTERNAL_ASSERT(storage->nbytes() == 0, "allocate: the storage holds ", storage->nbytes(), " bytes");
  TITAN_INTERNAL_ASSERT(tensor.storage_offset() == 0, "allocate: the tensor is a part of its storage");
  const auto bytes = static_cast<size_t>(bytes_needed(tensor));
  storage->set_data_ptr_noswap(resident_memory(bytes, tensor.device()));
  storage->set_nbytes(bytes);
}

void bind(const at::Tensor& tensor, const at::Tensor& owner, int64_t byte_offset) {
  c10::StorageImpl* storage = storage_impl(tensor);
  c10::StorageImpl* memory = storage_impl(owner);
  const auto first =
      static_cast<size_t>(owner.storage_offset()) * owner.element_size() + static_cast<size_t>(byte_offset);
  const auto bytes = static_cast<size_t>(bytes_needed(tensor));
  TITAN_INTERNAL_ASSERT(first + bytes <= memory->nbytes(), "bind: bytes ", first, " to ", first + bytes,
                        " of ", memory->nbytes());
  char* data = owner.device().is_meta() ? nullptr : static_cast<char*>(memory->mutable_data()) + first;
  void* context = c10::intrusive_ptr<c10::StorageImpl>(owner.storage().getWeakStorageImpl().lock()).release();
  storage->set_data_ptr_noswap(at::DataPtr(data, context, &release_owner, owner.device()));
  storage->set_nbytes(bytes);
}

void free(const at::Tensor& tensor) {
  c10::StorageImpl* storage = storage_impl(tensor);
  storage->set_data_ptr_noswap(at::DataPtr(nullptr, tensor.device()));
  storage->set_nbytes(static_cast<size_t>(0));
}

int64_t bytes(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.storage().nbytes()); }

}  // namespace param_storage
}  // namespace titan
