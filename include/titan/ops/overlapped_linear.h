#pragma once

// Linear layers that gather their input, or sum and scatter their output, themselves: while they multiply
// (asynchronous tensor parallelism; Wang et al., "Overlap communication with dependent computation via
// decomposition", 2023), or at once, so that what travels is what the products multiply (Float8).

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "titan/ops/joint_linear.h"
#include "titan/ops/products.h"
#include "titan/ops/sequence_exchange.h"

namespace titan::ops {

/// Several products over one input that lies in parts along the sequence: x: [B, S/N, I] on each of N ranks;
/// results: [B, S, O_i], from one gather. In the backward the gradients' products go part by part into one
/// scatter.
/// Where products want a cast of x with one scale for the whole (Products::part), that is what travels.
std::vector<at::Tensor> gathered_linears(const at::Tensor& x, const std::vector<SinkedWeight>& weights,
                                         const std::shared_ptr<const Products>& products,
                                         const std::shared_ptr<const SequenceExchange>& exchange);
/// `products`: of each weight; x travels as a cast only where all join.
std::vector<at::Tensor> gathered_linears(const at::Tensor& x, const std::vector<SinkedWeight>& weights,
                                         const std::vector<std::shared_ptr<const Products>>& products,
                                         const std::shared_ptr<const SequenceExchange>& exchange);

/// A product whose results are summands: x: [B, S, I/N]; weight: [O, I/N]; result: this rank's part [B, S/N,
/// O] of the sum. In the backward the gradient is gathered part by part.
at::Tensor scattered_linear(const at::Tensor& x, const SinkedWeight& weight,
                            const std::shared_ptr<const Products>& products,
                            const std::shared_ptr<const SequenceExchange>& exchange);

}  // namespace titan::ops
