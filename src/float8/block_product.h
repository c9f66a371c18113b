#pragma once

#include "float8/scaled_product.h"

namespace titan::float8 {

/// Scales [vectors, blocks] as cuBLAS reads them ("1D block scaling factors layout"): tiles of 128 vectors by
/// four blocks, 512 bytes each, one behind the other, with zeros where the matrix ends.
at::Tensor blocked_layout(const at::Tensor& scale);

/// a b^T of matrices in blocks, by at::_scaled_mm: compute capability 10.0.
at::Tensor hardware_block_product(const ops::ScaledMatrix& a_NK, const ops::ScaledMatrix& b_MK,
                                  const ScaledProductOptions& options);

}  // namespace titan::float8
