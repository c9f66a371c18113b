#pragma once

// Linear layers: their three matrix products as an interface (the output, the input's gradient and the
// weight's gradient), and layers as nodes of the autograd graph: single layers, several layers over one
// input, or layers that exchange a sequence between ranks while they multiply.
//
//   at::Tensor y = ops::linear(x, weight, bias, ops::default_products());
//
// Float8 recipes implement the products outside ops. To give a model's layers your own implementation, call
//
//   nn::set_products(*model, std::make_shared<MyProducts>());

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace titan::config {
template <class S>
class Table;
}

namespace titan::ops {

// ---- products

/// The phase of gathers of Float8 scales, which --print-plan lists separately from other gathers.
inline constexpr const char* kScalesPhase = "tp::float8_scales";

/// The ranks that hold the parts of one tensor. It is implemented over process groups in parallel/tensor, so
/// that ops doesn't depend on them.
class RankParts {
 public:
  virtual ~RankParts() = default;
  virtual int index() const = 0;  ///< this rank's part
  virtual int count() const = 0;
  /// out: [count, n], from every rank's in: [n]. Later work on the current stream sees the result. `phase`: a
  /// string literal that names the purpose in records of calls.
  virtual void all_gather(const at::Tensor& out, const at::Tensor& in, const char* phase) const = 0;
};

/// Rows [first, first + rows of the local weight) of a vocabulary of `size`, cut as torch.chunk does.
struct VocabularyPart {
  int64_t first = 0;
  int64_t size = 0;
  std::shared_ptr<const RankParts> parts;  ///< null: the vocabulary is whole
  bool gather_logits = false;              ///< gather each chunk's whole logits instead of sums over parts
};

/// A matrix in fewer bits: its values are data / scale. Products sum along the rows of `data`, so a matrix
/// that is summed down its columns is stored transposed.
struct ScaledMatrix {
  at::Tensor data;  ///< [vectors, elements] in an 8-bit floating-point dtype; may be a transposed view
  /// fp32: [] for the whole matrix, or [vectors, 1]. Float8_e8m0fnu: [vectors, blocks of 32 elements], a
  /// factor on data, or the same in tiles, of one dimension (blocked_layout() in float8/cast.h).
  at::Tensor scale;
  at::Tensor inverse = {};  ///< 1 / scale, which hardware multiplies by; undefined: not computed yet
  bool defined() const { return data.defined(); }
};

/// [Note: operands]
/// Each of a linear layer's three matrices is multiplied twice: along its rows (x and W for the output, g for
/// the input's gradient) and down its columns (W for the input's gradient, g and x for the weight's). Plain
/// products read `values`. Low-precision recipes cast a matrix once for all products that can use the result
/// and may then drop `values`. A product that needs a missing form makes it from `values`.
struct Operand {
  Operand() = default;
  Operand(at::Tensor matrix)  // NOLINT(google-explicit-constructor): a matrix is an operand
      : values(std::move(matrix)), dtype(values.scalar_type()) {}

  at::Tensor values;                  ///< undefined if the scaled forms suffice
  at::ScalarType dtype = at::kFloat;  ///< dtype of `values`, even if undefined, and of a product's result
  ScaledMatrix along_rows, down_columns;
};

/// Provides a weight's values if the parameter has no memory, for example when it is gathered in fewer bits.
class WeightSource {
 public:
  virtual ~WeightSource() = default;
  /// Called for each product, because the memory exists only while the layer is used.
  virtual Operand weight() const = 0;
};

/// Which features of a layer are split over ranks (tensor parallelism); null: each rank has all of them.
struct SpreadFeatures {
  std::shared_ptr<const RankParts> in, out;
};

/// A layer's pass: y = x W^T or dx = g W.
enum class Pass { Forward, Backward };

/// y = x W^T, dx = g W, dW = g^T x, with x: [N, in], W: [out, in], g, y: [N, out]. Results have the operands'
/// dtype. Operands ([Note: operands]) are plain matrices or results of input() and grad().
class Products {
 public:
  virtual ~Products() = default;
  virtual at::Tensor forward(const Operand& x_NI, const Operand& weight_OI) const = 0;
  virtual at::Tensor grad_input(const Operand& grad_NO, const Operand& weight_OI) const = 0;
  virtual at::Tensor grad_weight(const Operand& grad_NO, const Operand& x_NI) const = 0;
  /// sum + g W, possibly in sum's memory. The default computes grad_input and adds.
  virtual at::Tensor add_grad_input(const at::Tensor& sum_NI, const Operand& grad_NO,
                                    const Operand& weight_OI) const {
    return sum_NI.add_(grad_input(grad_NO, weight_OI));
  }
  /// out (fp32 or the weight's dtype, [O, I]) += g^T x. The default computes grad_weight and adds.
  virtual void add_grad_weight(const at::Tensor& out_OI, const Operand& grad_NO, const Operand& x_NI) const {
    out_OI.add_(grad_weight(grad_NO, x_NI));
  }
  /// out = g^T x, or with `adds` out += g^T x, by a product that writes to `out` itself. Returns false and does nothing
  /// if there is none.
  virtual bool put_grad_weight(const at::Tensor& /*out_OI*/, const Operand& /*grad_NO*/,
                               const Operand& /*x_NI*/, bool /*adds*/) const {
    return false;
  }

  /// out ([N, features], contiguous, or the same rows as [B, n, features] with gaps between those of each b, in the result's dtype) =
  /// forward(rows, weight) or grad_input(rows, weight), by a product that writes to `out` itself. False: there is none.
  virtual bool put_product(const at::Tensor& /*out*/, Pass /*pass*/, const Operand& /*rows*/,
                           const Operand& /*weight_OI*/) const {
    return false;
  }

  /// x with the scale that all its casts share, if they share one, as it must be known before the first
  /// product. `trains`: true in a training step even if this layer is frozen, false in validation.
  virtual Operand scaled(const Operand& x_NI, bool /*trains*/) const { return x_NI; }
  /// The same for an x that input() and kept() will be asked for: it may have both forms, made in one pass.
  virtual Operand scaled_to_keep(const Operand& x_NI, bool trains) const { return scaled(x_NI, trains); }
  /// x (plain, or scaled()'s result) for a forward, cast once for several weights.
  virtual Operand input(const Operand& x_NI, bool /*trains*/) const { return x_NI; }
  /// The form of x (plain, or from the two above) that grad_weight needs; only this is kept until the
  /// backward. Which of its tensors are defined doesn't depend on the device, because checkpointing asks for shapes on
  /// the meta device.
  virtual Operand kept(const Operand& x_NI) const { return x_NI; }
  /// g, cast for the backward products that will use it.
  virtual Operand grad(const Operand& grad_NO, bool /*for_input*/, bool /*for_weight*/) const {
    return grad_NO;
  }
  /// W, cast for several products of one pass, for example over parts of x.
  virtual Operand weight(const Operand& weight_OI, Pass /*pass*/) const { return weight_OI; }
  /// The same for the weights of several layers, whose products run one after the other: weights[i] is multiplied by
  /// products[i], of which this is one. May leave weights as they are: their products cast them.
  virtual void cast_weights(at::ArrayRef<const Products*> /*products*/, std::vector<Operand>& /*weights*/,
                            Pass /*pass*/) const {}

  /// [Note: parts of rows] Each rank has some rows of x (in a backward, of g), and all rows will be gathered.
  /// Returns the form of this rank's rows [n, F] that is sent: the values, or a cast with the scale of the
  /// whole matrix.
  virtual Operand part(const at::Tensor& rows, Pass /*pass*/, bool /*trains*/) const { return rows; }
  /// Whether multiplying some rows separately gives the same rows as multiplying all. If not, values that
  /// were sent are multiplied once all have arrived.
  virtual bool multiplies_rows_apart(Pass /*pass*/) const { return true; }

  /// The products for a layer whose features are split; null if these serve any layer.
  virtual std::shared_ptr<const Products> for_parts(const SpreadFeatures& /*parts*/) const { return nullptr; }
  /// Whether both can use the same input(), so that the layers may be computed as one node.
  virtual bool joins(const Products& other) const { return this == &other; }
};

/// How fp32 products run on a CPU. LibTorch sends them to MKL, which is slow on AMD processors; oneDNN isn't.
/// Auto decides by processor vendor, because a choice by timing would make reruns differ.
enum class CpuMatmul { Auto, Mkl, OneDnn };

using SharedProducts = std::shared_ptr<const Products>;

/// LibTorch's plain products with that policy; thread-safe, stateless.
SharedProducts default_products(CpuMatmul policy = CpuMatmul::Auto);

/// [ops]: the choice of kernels.
struct OpsSettings {
  std::string cpu_matmul = "auto";  ///< "auto", "mkl", "onednn"
  std::string kernels = "auto";     ///< "auto", "reference"

  CpuMatmul cpu_matmul_policy() const;
};
void describe(config::Table<OpsSettings>& table);

// ---- gradients of weights

/// A weight gradient that is ready to be computed. A linear layer's backward passes it to the weight's sink.
struct WeightGrad {
  std::shared_ptr<const Products> products;
  Operand grad_output_NO;
  Operand input_NI;
  at::Tensor compute() const { return products->grad_weight(grad_output_NO, input_NI); }
  void add_to(const at::Tensor& out_OI) const { products->add_grad_weight(out_OI, grad_output_NO, input_NI); }
};

/// A gradient that isn't a matrix product: an embedding's, computed when needed, or a norm's, computed
/// already.
struct DueGradient {
  std::function<at::Tensor()> compute;
  std::vector<at::Tensor> reads;  ///< tensors that `compute` keeps alive, for memory accounting
};

/// Receives one weight's gradients, one call per use and backward. An implementation computes them at once
/// (into its own fp32 buffer) or keeps the WeightGrad for later (zero-bubble schedules). A weight without a
/// sink gets its gradient from autograd.
class GradSink {
 public:
  virtual ~GradSink() = default;
  virtual void accept(WeightGrad grad) = 0;
  /// Adds scale * grad, a gradient that is computed already (the loss head's, if nothing was lent). `scale` is
  /// a scalar tensor on the gradient's device, so that the host doesn't wait for it; undefined means 1.
  virtual void accept(const at::Tensor& grad_OI, const at::Tensor& scale) = 0;
  /// The default computes the gradient at once.
  virtual void accept(DueGradient gradient) { accept(gradient.compute(), {}); }

  /// Lends memory of the sink for a gradient that is summed before its backward (the loss head's): blocks of the
  /// gradient's rows in order, with values of no meaning. Empty: there is none, and the caller allocates its own.
  virtual std::vector<at::Tensor> lend(at::ScalarType /*dtype*/) { return {}; }
  /// Takes lent blocks back and adds scale * their values. Blocks that are dropped instead add nothing.
  virtual void accept_lent(const std::vector<at::Tensor>& /*blocks*/, const at::Tensor& /*scale*/) {}
};

// ---- layers

/// A weight [O, I], the sink of its gradient (null: autograd) and the source of its values (null: the
/// weight).
struct SinkedWeight {
  SinkedWeight(at::Tensor weight, std::shared_ptr<GradSink> sink = nullptr,  // NOLINT: implicit by design
               std::shared_ptr<const WeightSource> source = nullptr)
      : weight(std::move(weight)), sink(std::move(sink)), source(std::move(source)) {}

  at::Tensor weight;
  std::shared_ptr<GradSink> sink;
  std::shared_ptr<const WeightSource> source;
};

/// y = x W^T (+ b). x: [..., I]; weight: [O, I]; bias: [O] or undefined; y: [..., O]. With a sink, the
/// backward gives the weight's gradient to the sink instead of autograd; the weight must still require
/// gradients. Keeps x if the weight needs a gradient, and the weight if x needs one. It keeps the same tensor
/// object, so a sharded weight may lose and regain its memory in between. With a source, `weight` itself
/// needs no memory. First derivatives only.
at::Tensor linear(const at::Tensor& x, const SinkedWeight& weight, const at::Tensor& bias,
                  const SharedProducts& products);

/// y_i = x W_i^T as one node. x: [..., I]; y_i: [..., O_i]. In the backward the products add up the gradients
/// of x (Products::add_grad_input); for separate layers autograd would have to add [..., I] tensors. x is
/// cast once and kept once ([Note: an input of several layers]). `products`: one for each weight; products
/// that join share x's casts. `bias`: [O], allowed only for a single layer, or undefined.
std::vector<at::Tensor> joint_linears(const at::Tensor& x, const std::vector<SinkedWeight>& weights,
                                      const std::vector<SharedProducts>& products,
                                      const at::Tensor& bias = {});

/// Gathers a sequence that is split over ranks, and scatters sums over ranks, part by part, so that products
/// run on the parts that have arrived while others are in transit. Implemented over process groups in
/// parallel/tensor, one object per module.
class SequenceExchange {
 public:
  virtual ~SequenceExchange() = default;
  virtual int count() const = 0;  ///< number of ranks, which is the number of parts
  /// Whether products run in parts only where a GPU is estimated to gain by it (ops/parts_estimate.h); if not, all do.
  virtual bool chooses_by_size() const { return false; }
  /// Identifies the transport: two modules with the same one may share an exchange.
  virtual const void* carrier() const { return this; }

  /// A running all-gather of parts.
  class Gather {
   public:
    virtual ~Gather() = default;
    /// The rank of the next part to arrive, this rank's own first; -1 when all have arrived.
    virtual int next() = 0;
    /// The part from `rank`, contiguous; valid once next() has returned that rank.
    virtual at::Tensor part(int rank) const = 0;
    /// All parts, [B, S, F], contiguous; valid once next() has returned -1.
    virtual at::Tensor whole() const = 0;
  };
  /// `part` is contiguous and has the same shape on all ranks.
  virtual std::unique_ptr<Gather> gather(const at::Tensor& part) const = 0;

  /// A running reduce-scatter: sums over ranks, one part for each rank.
  class Scatter {
   public:
    virtual ~Scatter() = default;
    /// The rank whose part to compute next, this rank's own last; -1 when all have been given.
    virtual int next() = 0;
    /// Sends this rank's summand (contiguous) for that rank. Don't write to it afterwards.
    virtual void give(const at::Tensor& summand) = 0;
    /// The sum of all ranks' summands for this rank, added in rank order.
    virtual at::Tensor finish() = 0;
  };
  virtual std::unique_ptr<Scatter> scatter() const = 0;

  /// Whether all parts arrive in one collective, so that no product can overlap it. Then the two functions
  /// below replace the two above.
  virtual bool at_once() const { return false; }
  /// part: [B, S/N, F], contiguous; result: [B, S, F].
  virtual at::Tensor gather_whole(const at::Tensor& part) const;
  /// summand: [B, S, F]; result: this rank's part [B, S/N, F] of the sum.
  virtual at::Tensor scatter_whole(const at::Tensor& summand) const;
};

/// joint_linears over an input that is split along the sequence. x: [B, S/N, I] on each of N ranks; results:
/// [B, S, O_i], from one gather. Parts are multiplied as they arrive (Wang et al., "Overlap communication
/// with dependent computation via decomposition", 2023). The backward computes x's gradient part by part into
/// one scatter. If all products join and cast x with one scale for the whole (Products::part), the cast is
/// sent.
std::vector<at::Tensor> gathered_linears(const at::Tensor& x, const std::vector<SinkedWeight>& weights,
                                         const std::vector<SharedProducts>& products,
                                         const std::shared_ptr<const SequenceExchange>& exchange);

/// A product whose results are summands: x: [B, S, I/N]; weight: [O, I/N]; result: this rank's part [B, S/N,
/// O] of the sum. The backward gathers the gradient part by part.
at::Tensor scattered_linear(const at::Tensor& x, const SinkedWeight& weight, const SharedProducts& products,
                            const std::shared_ptr<const SequenceExchange>& exchange);

}  // namespace titan::ops
