#pragma once

// How a sequence that is spread over ranks comes together, and sums of it are spread again, part by part, so
// that products run on the parts that are there while the others travel. Process groups are behind it
// (parallel/tensor).

#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "titan/ops/products.h"

namespace titan::ops {

/// One module's.
class SequenceExchange {
 public:
  virtual ~SequenceExchange() = default;
  virtual int count() const = 0;  ///< of ranks, so of parts
  /// What the parts travel by: two modules' may travel in one exchange where it is the same.
  virtual const void* carrier() const { return this; }

  /// The parts of all ranks, on their way.
  class Gather {
   public:
    virtual ~Gather() = default;
    /// The next part that is there, this rank's own first: its rank; -1 when all came.
    virtual int next() = 0;
    /// What rank `rank` sent, contiguous; only after next() gave it.
    virtual at::Tensor part(int rank) const = 0;
  };
  /// `part`: contiguous, of the same shape on all ranks.
  virtual std::unique_ptr<Gather> gather(const at::Tensor& part) const = 0;

  /// Sums over ranks, each for one of them.
  class Scatter {
   public:
    virtual ~Scatter() = default;
    /// The rank whose part is to be computed next, this rank's own last; -1 when all are given.
    virtual int next() = 0;
    /// This rank's summand (contiguous) for that rank. It travels on; don't write it any more.
    virtual void give(const at::Tensor& summand) = 0;
    /// The sum of what all ranks gave for this one, in rank order.
    virtual at::Tensor finish() = 0;
  };
  virtual std::unique_ptr<Scatter> scatter() const = 0;

  /// Whether all parts come in one collective, and nothing can be multiplied meanwhile: then the two below
  /// take the place of the two above.
  virtual bool at_once() const { return false; }
  /// part: [B, S/N, F], contiguous; result: [B, S, F].
  virtual at::Tensor gather_whole(const at::Tensor& part) const;
  /// summand: [B, S, F]; result: this rank's part [B, S/N, F] of the sum.
  virtual at::Tensor scatter_whole(const at::Tensor& summand) const;
};

// A linear layer as one node of the autograd graph.

/// y = x W^T (+ b). x: [..., I]; weight: [O, I]; bias: [O] or undefined; y: [..., O].
/// With a `weight_sink` the weight's gradient goes there in the backward, and autograd gets none; the weight
/// has to require gradients all the same. Keeps x if the weight needs a gradient and the weight (the same
/// tensor object, so a sharded one whose memory has come back serves) if x does. With a `weight_source` the
/// weight's values are its, and `weight` itself needs no memory. First derivatives only.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                  const std::shared_ptr<const Products>& products,
                  const std::shared_ptr<GradSink>& weight_sink = nullptr,
                  const std::shared_ptr<const WeightSource>& weight_source = nullptr);

// Linear layers of one input as one node of the autograd graph.

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

// Linear layers that gather their input, or sum and scatter their output, themselves: while they multiply
// (asynchronous tensor parallelism; Wang et al., "Overlap communication with dependent computation via
// decomposition", 2023), or at once, so that what travels is what the products multiply (Float8).

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
