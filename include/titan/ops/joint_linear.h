#pragma once

// Linear layers of one input as one node of the autograd graph.

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "titan/ops/products.h"

namespace titan::ops {

/// A weight [O, I], who takes its gradient (null: autograd), and where its values are (null: in itself).
struct SinkedWeight {
  at::Tensor weight;
  std::shared_ptr<GradSink> sink = nullptr;
  std::shared_ptr<const WeightSource> source = nullptr;
};

/// y_i = x W_i^T. x: [..., I]; y_i: [..., O_i]. In the backward the gradients of x are added up by the
/// products themselves (Products::add_grad_input), where layers apart would leave autograd a sum of [..., I]
/// tensors. x is cast once, and kept once ([Note: an input of several layers]).
std::vector<at::Tensor> joint_linears(const at::Tensor& x, const std::vector<SinkedWeight>& weights,
                                      const std::shared_ptr<const Products>& products);
/// `products`: of each weight; those that join share x's casts.
std::vector<at::Tensor> joint_linears(const at::Tensor& x, const std::vector<SinkedWeight>& weights,
                                      const std::vector<std::shared_ptr<const Products>>& products);

}  // namespace titan::ops
