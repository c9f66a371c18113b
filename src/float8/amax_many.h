#pragma once

#include <ATen/core/Tensor.h>

namespace titan::float8::composite {

/// Of each tensor, one after the other: what titan::float8_amax_many's kernels equal bit for bit.
at::Tensor amax_many(at::TensorList xs);

}  // namespace titan::float8::composite
