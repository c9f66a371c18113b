#pragma once

#include <memory>

#include <ATen/core/Tensor.h>

#include "titan/ops/products.h"

namespace titan::ops {

/// x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich, 2019). x: [..., D];
/// weight: [D]. Computed in fp32 (float64 of float64) and rounded once to x's dtype. The weight's gradient is
/// summed in fp32 in an order that doesn't depend on the number of threads, in the pass that makes x's, and
/// goes to `weight_sink` if there is one. First derivatives only.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight_D, double eps,
                    const std::shared_ptr<GradSink>& weight_sink = nullptr);

}  // namespace titan::ops
