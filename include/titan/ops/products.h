#pragma once

// What an operation needs to know when a matrix that it multiplies by is spread over ranks. Process groups
// are behind it (parallel/tensor), so that ops don't know of them.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace titan::ops {

/// The phase of gathers of Float8 scales, which --print-plan tells from others.
inline constexpr const char* kScalesPhase = "tp::float8_scales";

/// The ranks that hold the parts of one tensor.
class RankParts {
 public:
  virtual ~RankParts() = default;
  virtual int index() const = 0;  ///< this rank's
  virtual int count() const = 0;
  /// out: [count, n], from every rank's in: [n]. Later work of the current stream sees the result. `phase`: a
  /// literal, what it is for, in records of calls.
  virtual void all_gather(const at::Tensor& out, const at::Tensor& in, const char* phase) const = 0;
};

/// Rows [first, first + rows of the local weight) of a vocabulary of `size`: torch.chunk's parts.
struct VocabularyPart {
  int64_t first = 0;
  int64_t size = 0;
  std::shared_ptr<const RankParts> parts;  ///< null: the vocabulary is whole
  bool gather_logits = false;              ///< make each chunk's logits whole instead of summing over parts
};

// What products multiply.

/// A matrix in fewer bits: its values are data / scale. Each row of `data` is a vector that a product sums
/// over, so a matrix whose columns are summed over lies transposed here.
struct ScaledMatrix {
  at::Tensor data;   ///< [vectors, elements], of an 8-bit floating-point dtype; perhaps a transposed view
  at::Tensor scale;  ///< fp32: [] for the whole matrix, [vectors, 1] for each vector; Float8_e8m0fnu:
                     ///< [vectors, blocks of 32 elements], by which data is multiplied (float8/block_cast.h)
  bool defined() const { return data.defined(); }
};

/// [Note: operands]
/// Each of a linear layer's three matrices is multiplied twice: along its rows (x and W in the output, g in
/// the input's gradient) and down its columns (W in the input's gradient, g and x in the weight's). Plain
/// products read `values`; recipes of fewer bits cast a matrix once for all products that can use the result,
/// and may then drop `values`. A form that isn't there is made from `values` by the product that needs it.
struct Operand {
  Operand() = default;
  Operand(at::Tensor matrix)  // NOLINT(google-explicit-constructor): a matrix is an operand
      : values(std::move(matrix)), dtype(values.scalar_type()) {}

  at::Tensor values;  ///< undefined where the scaled forms suffice
  at::ScalarType dtype =
      at::kFloat;  ///< of `values`, whether they are here or not; a product's result has it
  ScaledMatrix along_rows;
  ScaledMatrix down_columns;
};

/// Where a weight is whose parameter has no memory, as it was gathered in fewer bits.
class WeightSource {
 public:
  virtual ~WeightSource() = default;
  /// To be asked for by each product: memory comes and goes with the layer's use.
  virtual Operand weight() const = 0;
};

// The three products of a linear layer behind one interface, and the sink that takes the weight's gradient.
// Float8, asynchronous tensor parallelism and fused epilogues are implementations outside nn.

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
