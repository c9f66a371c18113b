#pragma once

#include <ATen/core/Tensor.h>

namespace titan::context {

/// Memory that is used again by every layer and step; grows to the longest sequence.
class Buffer {
 public:
  /// Contiguous; what is in it is anything. One at a time: the next call hands out the same memory.
  at::Tensor get(at::IntArrayRef sizes, const at::TensorOptions& options);

 private:
  at::Tensor memory_;  // bytes
  at::Tensor last_;    // what was handed out: a model's layers ask for the same
};

}  // namespace titan::context
