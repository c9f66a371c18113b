#pragma once

namespace titan::ops {

/// The processor's properties that the choice of kernels depends on.
struct CpuFeatures {
  bool amd = false;
  bool avx512 = false;               ///< foundation, byte/word, doubleword/quadword and short vectors
  bool fast_16bit_products = false;  ///< LibTorch has a vector kernel for bf16 products here
};

const CpuFeatures& cpu_features();

}  // namespace titan::ops
