#include "parallel/fsdp/buffer_pool.h"

#include <algorithm>

#include <c10/core/Storage.h>

#include "tensor/resident_memory.h"

namespace titan::fsdp {

namespace {

// A buffer serves requests down to this share of its size: a block's buffer is not spent on a norm's.
constexpr double kSmallestUse = 0.8;

}  // namespace

BufferPool::~BufferPool() {
  for (const Free& free : free_) free.used.synchronize();
}

at::Tensor BufferPool::take_fitting(int64_t bytes, const dist::Stream& user) {
  auto best = free_.end();
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    const int64_t size = it->bytes.numel();
    if (size < bytes || static_cast<double>(bytes) < kSmallestUse * static_cast<double>(size)) continue;
    if (best == free_.end() || size < best->bytes.numel()) best = it;
  }
  if (best == free_.end()) return {};
  user.wait(best->used);
  at::Tensor buffer = std::move(best->bytes);
  free_.erase(best);
  return buffer;
}

at::Tensor BufferPool::acquire(int64_t numel, at::ScalarType dtype, const dist::Stream& user) {
  const int64_t bytes = std::max<int64_t>(numel, 1) * static_cast<int64_t>(c10::elementSize(dtype));
  at::Tensor buffer = take_fitting(bytes, user);
  if (!buffer.defined()) {
    // Made on the current stream; events order every later use, so the allocator never has to know of other
    // streams.
    buffer = resident_empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device_));
    ++num_allocations_;
  }
  at::Tensor typed = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(buffer.storage()), buffer.key_set(), c10::scalarTypeToTypeMeta(dtype));
  typed.unsafeGetTensorImpl()->set_sizes_contiguous({numel});
  return typed;
}

void BufferPool::release(at::Tensor buffer, const dist::Stream& last_user) {
  const auto bytes = static_cast<int64_t>(buffer.storage().nbytes());
  at::Tensor whole = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(buffer.storage()), buffer.key_set(), c10::scalarTypeToTypeMeta(at::kByte));
  whole.unsafeGetTensorImpl()->set_sizes_contiguous({bytes});
  free_.push_back({std::move(whole), last_user.record()});
}

}  // namespace titan::fsdp
