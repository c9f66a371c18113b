#pragma once

#include <ATen/core/Tensor.h>

namespace titan::float8::composite {

/// titan::float8_delayed_scale (delayed_scales.cpp) in terms of LibTorch's operations, which its kernels
/// equal.
at::Tensor delayed_scale(const at::Tensor& amax, const at::Tensor& pending, const at::Tensor& largest,
                         at::ScalarType dtype, bool power_of_two, bool records);

}  // namespace titan::float8::composite
