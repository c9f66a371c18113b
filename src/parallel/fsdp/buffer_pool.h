#pragma once

// Communication buffers, made once and handed around: from the third step on nothing is allocated.

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "titan/dist/stream.h"

namespace titan::fsdp {

/// Gives out one-dimensional tensors of bytes on one device. Not thread-safe: forward and backward of a model
/// take turns.
class BufferPool {
 public:
  explicit BufferPool(at::Device device) : device_(device) {}
  /// Blocks until the streams are past the buffers: the allocator knows of one stream only.
  ~BufferPool();

  /// A buffer of `numel` elements of `dtype`; `user` may write it at once (it waits for the stream that used
  /// it last).
  at::Tensor acquire(int64_t numel, at::ScalarType dtype, const dist::Stream& user);
  /// Takes a buffer back; its memory is handed out again after the work that `last_user` has queued by now.
  void release(at::Tensor buffer, const dist::Stream& last_user);

  int64_t num_allocations() const { return num_allocations_; }

 private:
  struct Free {
    at::Tensor bytes;
    dist::Event used;
  };
  at::Tensor take_fitting(int64_t bytes, const dist::Stream& user);

  at::Device device_;
  std::vector<Free> free_;
  int64_t num_allocations_ = 0;
};

}  // namespace titan::fsdp
