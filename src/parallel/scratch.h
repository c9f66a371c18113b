#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/accumulate.h>

#include "dist/device_backend.h"

namespace titan {

/// Memory reused by every layer and step. It grows to the largest request.
class Scratch {
 public:
  /// A contiguous tensor with unspecified values. The next call returns the same memory.
  at::Tensor get(at::IntArrayRef sizes, const at::TensorOptions& options) {
    const at::ScalarType dtype = c10::typeMetaToScalarType(options.dtype());
    if (last_.defined() && last_.sizes() == sizes && last_.scalar_type() == dtype &&
        last_.device() == options.device())
      return last_;
    const auto bytes = c10::multiply_integers(sizes) * static_cast<int64_t>(options.dtype().itemsize());
    if (!memory_.defined() || memory_.numel() < bytes || memory_.device() != options.device()) {
      // The old memory is freed before the new one is allocated.
      if (memory_.defined()) dist::note_replaced_memory();
      last_.reset();
      memory_.reset();
      memory_ = at::empty({bytes}, options.dtype(at::kByte));
    }
    last_ = memory_.narrow(0, 0, bytes).view(dtype).view(sizes);
    return last_;
  }

 private:
  at::Tensor memory_;  // bytes
  at::Tensor last_;    // the last result, because a model's layers ask for the same sizes
};

}  // namespace titan
