#pragma once

namespace titan::ops {

/// What the processor is, as far as the choice of kernels depends on it.
struct CpuFeatures {
  bool amd = false;
  bool avx512 = false;               ///< foundation, byte/word, doubleword/quadword and short vectors
  bool fast_16bit_products = false;  ///< LibTorch's bf16 products have a vector kernel here
};

const CpuFeatures& cpu_features();

}  // namespace titan::ops
