#pragma once

// How a sequence that is spread over ranks comes together, and sums of it are spread again, part by part, so
// that products run on the parts that are there while the others travel. Process groups are behind it
// (parallel/tensor).

#include <memory>

#include <ATen/core/Tensor.h>

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

}  // namespace titan::ops
