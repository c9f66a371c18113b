#pragma once

// Linear layers as nodes of the autograd graph: one layer, several layers of one input, and layers that
// exchange a sequence between ranks while they multiply.
//
//   at::Tensor y = ops::linear(x, weight, bias, ops::default_products());

#include "titan/ops/products.h"

namespace titan::ops {

using SharedProducts = std::shared_ptr<const Products>;

/// A weight [O, I], the sink of its gradient (null: autograd) and the source of its values (null: itself).
struct SinkedWeight {
  SinkedWeight(at::Tensor weight, std::shared_ptr<GradSink> sink = nullptr,  // NOLINT: a weight alone is one
               std::shared_ptr<const WeightSource> source = nullptr)
      : weight(std::move(weight)), sink(std::move(sink)), source(std::move(source)) {}

  at::Tensor weight;
  std::shared_ptr<GradSink> sink;
  std::shared_ptr<const WeightSource> source;
};

/// y = x W^T (+ b). x: [..., I]; weight: [O, I]; bias: [O] or undefined; y: [..., O]. With a sink the
/// weight's gradient goes there in the backward and autograd gets none; the weight must require gradients all
/// the same. Keeps x if the weight needs a gradient, and the weight if x does: the same tensor object, so
/// that a sharded weight may lose and regain its memory in between. With a source, `weight` itself needs no
/// memory. First derivatives only.
at::Tensor linear(const at::Tensor& x, const SinkedWeight& weight, const at::Tensor& bias,
                  const SharedProducts& products);

/// y_i = x W_i^T as one node. x: [..., I]; y_i: [..., O_i]. In the backward the products add up the gradients
/// of x (Products::add_grad_input); separate layers would leave autograd a sum of [..., I] tensors. x is cast
/// once and kept once ([Note: an input of several layers]).
/// `products`: one for each weight; those that join share x's casts.
std::vector<at::Tensor> joint_linears(const at::Tensor& x, const std::vector<SinkedWeight>& weights,
                                      const std::vector<SharedProducts>& products);
inline std::vector<at::Tensor> joint_linears(const at::Tensor& x, const std::vector<SinkedWeight>& weights,
                                             const SharedProducts& products) {
  return joint_linears(x, weights, std::vector(weights.size(), products));
}

/// Brings a sequence that is split over ranks together, and splits sums of it again, part by part, so that
/// products run on the parts that have arrived while the others travel. Implemented over process groups in
/// parallel/tensor, one object per module.
class SequenceExchange {
 public:
  virtual ~SequenceExchange() = default;
  virtual int count() const = 0;  ///< number of ranks, so of parts
  /// Identifies the transport: two modules with the same one may share an exchange.
  virtual const void* carrier() const { return this; }

  /// An all-gather of parts in flight.
  class Gather {
   public:
    virtual ~Gather() = default;
    /// The rank of the next part to arrive, this rank's own first; -1 when all have arrived.
    virtual int next() = 0;
    /// What `rank` sent, contiguous; only after next() returned it.
    virtual at::Tensor part(int rank) const = 0;
  };
  /// `part`: contiguous, of the same shape on all ranks.
  virtual std::unique_ptr<Gather> gather(const at::Tensor& part) const = 0;

  /// A reduce-scatter in flight: sums over ranks, one part for each rank.
  class Scatter {
   public:
    virtual ~Scatter() = default;
    /// The rank whose part to compute next, this rank's own last; -1 when all were given.
    virtual int next() = 0;
    /// This rank's summand (contiguous) for that rank. It is sent on: don't write to it any more.
    virtual void give(const at::Tensor& summand) = 0;
    /// The sum of what all ranks gave for this one, in rank order.
    virtual at::Tensor finish() = 0;
  };
  virtual std::unique_ptr<Scatter> scatter() const = 0;

  /// Whether all parts come in one collective, so that nothing can be multiplied meanwhile: then the two
  /// functions below replace the two above.
  virtual bool at_once() const { return false; }
  /// part: [B, S/N, F], contiguous; result: [B, S, F].
  virtual at::Tensor gather_whole(const at::Tensor& part) const;
  /// summand: [B, S, F]; result: this rank's part [B, S/N, F] of the sum.
  virtual at::Tensor scatter_whole(const at::Tensor& summand) const;
};

/// joint_linears over an input that is split along the sequence: x: [B, S/N, I] on each of N ranks; results:
/// [B, S, O_i], from one gather. Parts are multiplied as they arrive (Wang et al., "Overlap communication
/// with dependent computation via decomposition", 2023). The backward computes x's gradient part by part into
/// one scatter. Where all products join and want a cast of x with one scale for the whole (Products::part),
/// the cast is sent.
std::vector<at::Tensor> gathered_linears(const at::Tensor& x, const std::vector<SinkedWeight>& weights,
                                         const std::vector<SharedProducts>& products,
                                         const std::shared_ptr<const SequenceExchange>& exchange);
inline std::vector<at::Tensor> gathered_linears(const at::Tensor& x, const std::vector<SinkedWeight>& weights,
                                                const SharedProducts& products,
                                                const std::shared_ptr<const SequenceExchange>& exchange) {
  return gathered_linears(x, weights, std::vector(weights.size(), products), exchange);
}

/// A product whose results are summands: x: [B, S, I/N]; weight: [O, I/N]; result: this rank's part [B, S/N,
/// O] of the sum. The backward gathers the gradient part by part.
at::Tensor scattered_linear(const at::Tensor& x, const SinkedWeight& weight, const SharedProducts& products,
                            const std::shared_ptr<const SequenceExchange>& exchange);

}  // namespace titan::ops
