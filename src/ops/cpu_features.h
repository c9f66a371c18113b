#pragma once

namespace titan::ops {

/// The properties of the processor that determine the choice of kernels.
struct CpuFeatures {
  bool amd = false;
  bool avx2 = false;
  bool avx512 = false;               ///< AVX-512 F, BW, DQ and VL
  bool fast_16bit_products = false;  ///< LibTorch has a vector kernel for bf16 products here
};

inline const CpuFeatures& cpu_features() {
  static const CpuFeatures features = [] {
#if defined(__x86_64__)
    __builtin_cpu_init();
    CpuFeatures found;
    found.amd = __builtin_cpu_is("amd");
    found.avx2 = __builtin_cpu_supports("avx2");
    found.avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    found.fast_16bit_products = found.avx512;  // oneDNN's bf16 product requires AVX-512
    return found;
#else
    return CpuFeatures{.fast_16bit_products = true};
#endif
  }();
  return features;
}

}  // namespace titan::ops
