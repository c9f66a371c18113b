#pragma once

#include "titan/ops/products.h"

namespace titan::float8 {

struct ScaledProductOptions {
  at::ScalarType out_dtype = at::kFloat;
  bool fast_accumulation = false;
  bool power_of_two_scales = false;
};

/// a b^T, a: [N, K], b: [M, K], summed in fp32. By at::_scaled_mm; where K is no multiple of 16, with zeros
/// behind.
at::Tensor hardware_product(const ops::ScaledMatrix& a_NK, const ops::ScaledMatrix& b_MK,
                            const ScaledProductOptions& options);

/// The same from the values in fp32: only the roundings within fp32 differ from the hardware's.
at::Tensor emulated_product(const ops::Products& plain, const ops::ScaledMatrix& a_NK,
                            const ops::ScaledMatrix& b_MK, const ScaledProductOptions& options);

/// Scales [vectors, blocks] as cuBLAS reads them ("1D block scaling factors layout"): tiles of 128 vectors by
/// four blocks, 512 bytes each, one behind the other, with zeros where the matrix ends.
at::Tensor blocked_layout(const at::Tensor& scale);

/// a b^T of matrices in blocks, by at::_scaled_mm: compute capability 10.0.
at::Tensor hardware_block_product(const ops::ScaledMatrix& a_NK, const ops::ScaledMatrix& b_MK,
                                  const ScaledProductOptions& options);

}  // namespace titan::float8
