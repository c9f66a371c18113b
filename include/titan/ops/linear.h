#pragma once

// A linear layer as one node of the autograd graph.

#include <memory>
#include <optional>

#include <ATen/core/Tensor.h>

#include "titan/ops/products.h"

namespace titan::ops {

/// y = x W^T (+ b). x: [..., I]; weight: [O, I]; bias: [O] or undefined; y: [..., O].
/// With a `weight_sink` the weight's gradient goes there in the backward, and autograd gets none; the weight
/// has to require gradients all the same. Keeps x if the weight needs a gradient and the weight (the same
/// tensor object, so a sharded one whose memory has come back serves) if x does. With a `weight_source` the
/// weight's values are its, and `weight` itself needs no memory. First derivatives only.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                  const std::shared_ptr<const Products>& products,
                  const std::shared_ptr<GradSink>& weight_sink = nullptr,
                  const std::shared_ptr<const WeightSource>& weight_source = nullptr);

}  // namespace titan::ops
