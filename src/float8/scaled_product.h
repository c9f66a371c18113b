#pragma once

#include "titan/ops/products.h"

namespace titan::float8 {

struct ScaledProductOptions {
  at::ScalarType out_dtype = at::kFloat;
  bool fast_accumulation = false;
  bool power_of_two_scales = false;
};

/// a b^T by at::_scaled_mm, summed in fp32. a: [N, K], b: [M, K]; K is padded with zeros to a multiple of 16.
/// Matrices in blocks need compute capability 10.0.
at::Tensor hardware_product(const ops::ScaledMatrix& a_NK, const ops::ScaledMatrix& b_MK,
                            const ScaledProductOptions& options);

/// The same from the values in fp32: only rounding within fp32 differs from the hardware's.
at::Tensor emulated_product(const ops::Products& plain, const ops::ScaledMatrix& a_NK,
                            const ops::ScaledMatrix& b_MK, const ScaledProductOptions& options);

/// Scales [vectors, blocks] as cuBLAS reads them ("1D block scaling factors layout"): tiles of 128 vectors by
/// four blocks, 512 bytes each, one after the other, padded with zeros.
at::Tensor blocked_layout(const at::Tensor& scale);

}  // namespace titan::float8
