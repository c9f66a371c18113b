#include "titan/ops/settings.h"

namespace titan::ops {

void describe(config::Table<OpsSettings>& table) {
  table.field(
      "cpu_matmul", &OpsSettings::cpu_matmul,
      "library of fp32 products on CPUs; \"auto\" chooses by processor, so that reruns stay bit-equal",
      config::one_of({"auto", "mkl", "onednn"}));
}

CpuMatmul OpsSettings::cpu_matmul_policy() const {
  if (cpu_matmul == "mkl") return CpuMatmul::Mkl;
  if (cpu_matmul == "onednn") return CpuMatmul::OneDnn;
  return CpuMatmul::Auto;
}

}  // namespace titan::ops
