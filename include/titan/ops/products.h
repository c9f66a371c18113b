#pragma once

// The three products of a linear layer behind one interface, and the sink that takes the weight's gradient.
// Float8, asynchronous tensor parallelism and fused epilogues are implementations outside nn.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "titan/ops/operand.h"
#include "titan/ops/rank_parts.h"

namespace titan::ops {

/// Which features of a layer are spread over ranks (tensor parallelism); null: each rank has all.
struct SpreadFeatures {
  std::shared_ptr<const RankParts> in, out;
};

/// Of a layer: y = x W^T, or dx = g W.
enum class Pass { Forward, Backward };

/// y = x W^T, dx = g W, dW = g^T x, with x: [N, in], W: [out, in], g, y: [N, out]; results have the operands'
/// dtype. Operands ([Note: operands]) come as the matrices themselves, or as input() and grad() made them.
class Products {
 public:
  virtual ~Products() = default;
  virtual at::Tensor forward(const Operand& x_NI, const Operand& weight_OI) const = 0;
  virtual at::Tensor grad_input(const Operand& grad_NO, const Operand& weight_OI) const = 0;
  virtual at::Tensor grad_weight(const Operand& grad_NO, const Operand& x_NI) const = 0;
  /// sum + g W, perhaps in sum's memory. The default computes grad_input and adds.
  virtual at::Tensor add_grad_input(const at::Tensor& sum_NI, const Operand& grad_NO,
                                    const Operand& weight_OI) const;
  /// out (fp32 or the weight's dtype, [O, I]) += g^T x. The default computes grad_weight and adds.
  virtual void add_grad_weight(const at::Tensor& out_OI, const Operand& grad_NO, const Operand& x_NI) const;

  /// x with the scale that its casts share, if they do: what has to be known before anything is multiplied.
  /// `trains`: in a training step, whether the layer itself learns or not; false in a validation.
  virtual Operand scaled(const Operand& x_NI, bool trains) const;
  /// x (as it is, or scaled()'s result) for a forward, cast once for several weights.
  virtual Operand input(const Operand& x_NI, bool trains) const;
  /// What grad_weight needs of x (as it is, or the results of the two): this alone is kept until the
  /// backward.
  virtual Operand kept(const Operand& x_NI) const;
  /// g for those of the two products that will take it.
  virtual Operand grad(const Operand& grad_NO, bool for_input, bool for_weight) const;
  /// W for several products of one pass, of parts of x say.
  virtual Operand weight(const Operand& weight_OI, Pass pass) const;

  /// [Note: parts of rows] Of x (in a backward: g) each rank has some rows, and all are to be gathered. What
  /// travels, of rows [n, F]: the values, or a cast with the scale of the whole. `trains`: as scaled()'s.
  virtual Operand part(const at::Tensor& rows, Pass pass, bool trains) const;
  /// Whether a product of some rows is those rows of the product; else values that travelled are multiplied
  /// when all are there.
  virtual bool multiplies_rows_apart(Pass pass) const;

  /// These products for a layer of parts; null: they are the same for any.
  virtual std::shared_ptr<const Products> for_parts(const SpreadFeatures& parts) const;
  /// Whether input() of one serves the other, so that layers may be computed as one node.
  virtual bool joins(const Products& other) const { return this == &other; }
};

/// How fp32 products run on a CPU: LibTorch sends them to MKL, which is slow on AMD processors; oneDNN isn't.
/// A choice by timing would break bit-equal reruns, so it is made by processor vendor.
enum class CpuMatmul { Auto, Mkl, OneDnn };

/// The plain products of LibTorch under that policy; thread-safe, stateless.
std::shared_ptr<const Products> default_products(CpuMatmul policy = CpuMatmul::Auto);

/// A weight gradient that is ready to be computed: what a Linear's backward hands to its sink.
struct WeightGrad {
  std::shared_ptr<const Products> products;
  Operand grad_output_NO;
  Operand input_NI;
  at::Tensor compute() const { return products->grad_weight(grad_output_NO, input_NI); }
  void add_to(const at::Tensor& out_OI) const { products->add_grad_weight(out_OI, grad_output_NO, input_NI); }
};

/// A gradient that isn't a product: an embedding's, computed when it is due, or a norm's, which is there by
/// then.
struct DueGradient {
  std::function<at::Tensor()> compute;
  std::vector<at::Tensor> reads;  ///< what `compute` holds, for who counts memory
};

/// Takes one weight's gradients, one call per use and backward. An implementation computes at once (into an
/// fp32 buffer that it owns), or keeps the WeightGrad for later (zero-bubble schedules). Without a sink the
/// gradient goes the way of autograd.
class GradSink {
 public:
  virtual ~GradSink() = default;
  virtual void accept(WeightGrad grad) = 0;
  /// A gradient that is computed already (the loss head's accumulated buffer): adds scale * grad. `scale` is
  /// a scalar tensor on the gradient's device, so that the host needn't know it; undefined: 1.
  virtual void accept(const at::Tensor& grad_OI, const at::Tensor& scale) = 0;
  /// The default computes it at once.
  virtual void accept(DueGradient gradient) { accept(gradient.compute(), {}); }
};

}  // namespace titan::ops
