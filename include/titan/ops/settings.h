#pragma once

#include <string>

#include "titan/config/table.h"
#include "titan/ops/products.h"

namespace titan::ops {

/// [ops]: which kernels compute.
struct OpsSettings {
  std::string cpu_matmul = "auto";  ///< "auto", "mkl", "onednn"

  CpuMatmul cpu_matmul_policy() const;
};

void describe(config::Table<OpsSettings>& table);

}  // namespace titan::ops
