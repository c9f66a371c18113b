#pragma once

// The operations of float8 in terms of LibTorch's: what runs where there is no kernel of ours, and what the
// kernels equal bit for bit. Arguments as in library.cpp's schemas.

#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>

namespace titan::float8::composite {

at::Tensor amax(const at::Tensor& x, std::optional<int64_t> dim);
at::Tensor scale_of(const at::Tensor& amax, at::ScalarType dtype, bool power_of_two);
at::Tensor cast(const at::Tensor& x, const at::Tensor& scale, at::ScalarType dtype, bool transposed);

}  // namespace titan::float8::composite
