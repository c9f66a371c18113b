#pragma once

// Memory for what other ranks send, used again from micro-batch to micro-batch.

#include <atomic>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "titan/train/step_runner.h"

namespace titan::train {

/// Buffers of one step: as many as are in use at once, whatever the number of micro-batches.
class ReceiveBuffers {
 public:
  explicit ReceiveBuffers(at::Device device) : device_(device) {}

  /// A tensor without a graph, whose memory nobody else has: a tensor that this gave before, a view of it or
  /// what a graph saved of it keeps the memory from being given again. Its content is anything.
  at::Tensor take(const TensorType& type) {
    for (const at::Tensor& buffer : buffers_)
      if (buffer.sizes() == type.sizes && buffer.scalar_type() == type.dtype && is_free(buffer))
        return buffer.variable_data();
    buffers_.push_back(at::empty(type.sizes, at::TensorOptions(device_).dtype(type.dtype)));
    return buffers_.back().variable_data();
  }

 private:
  // On the host a backend's thread may have been the last to let go: what it did comes before what follows.
  // On a GPU whoever let go has queued all that uses the memory, and a receive starts behind what is queued.
  static bool is_free(const at::Tensor& buffer) {
    if (buffer.storage().use_count() != 1) return false;
    std::atomic_thread_fence(std::memory_order_acquire);
    return true;
  }

  at::Device device_;
  std::vector<at::Tensor> buffers_;
};

}  // namespace titan::train
