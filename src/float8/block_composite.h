#pragma once

// Casting blocks in terms of LibTorch's operations: what runs where there is no kernel of ours, and what the
// kernels equal bit for bit.

#include <tuple>

#include <ATen/core/Tensor.h>

namespace titan::float8::composite {

/// Data and scales of titan::float8_cast_blocks (block_cast.cpp).
std::tuple<at::Tensor, at::Tensor> cast_blocks(const at::Tensor& x, at::ScalarType dtype, bool round_up,
                                               bool transposed);

}  // namespace titan::float8::composite
