#include "ops/cpu_features.h"

namespace titan::ops {

namespace {

#if defined(__x86_64__)
CpuFeatures detect() {
  __builtin_cpu_init();
  CpuFeatures features;
  features.amd = __builtin_cpu_is("amd");
  features.avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  features.fast_16bit_products = features.avx512;  // what oneDNN's bf16 product requires
  return features;
}
#else
CpuFeatures detect() { return {.fast_16bit_products = true}; }
#endif

}  // namespace

const CpuFeatures& cpu_features() {
  static const CpuFeatures features = detect();
  return features;
}

}  // namespace titan::ops
