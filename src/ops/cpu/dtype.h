#pragma once

// Chooses a kernel's template argument by a tensor's dtype.

#include <ATen/core/Tensor.h>
#include <c10/util/BFloat16.h>

#include "titan/core/error.h"

namespace titan::ops::cpu {

/// Whether all tensors have the same dtype, one that CPU kernels exist for.
template <class... Tensors>
bool have_kernel(const at::Tensor& first, const Tensors&... others) {
  const at::ScalarType dtype = first.scalar_type();
  const bool known = dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kDouble;
  return known && ((others.scalar_type() == dtype) && ...);
}

/// Calls kernel(static_cast<T*>(nullptr)) with T of the tensor's dtype, one that have_kernel() accepts.
template <class Kernel>
void dispatch(const at::Tensor& tensor, Kernel&& kernel) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return kernel(static_cast<float*>(nullptr));
    case at::kBFloat16:
      return kernel(static_cast<c10::BFloat16*>(nullptr));
    case at::kDouble:
      return kernel(static_cast<double*>(nullptr));
    default:
      TITAN_INTERNAL_ASSERT(false, "no CPU kernel for ", tensor.scalar_type());
  }
}

}  // namespace titan::ops::cpu
