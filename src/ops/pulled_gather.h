#pragma once

// An operand of which each rank has some rows, on its way to being whole: what overlapped products pull parts
// out of.

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "titan/ops/products.h"
#include "titan/ops/sequence_exchange.h"

namespace titan::ops {

/// The part of [B, S, F] that is rank r's: not contiguous unless B is 1.
at::Tensor part_of_sequence(const at::Tensor& whole, int rank, int count);
/// The same of an operand of rows [B * S, F].
Operand part_of_sequence(const Operand& whole, int64_t batch, int rank, int count);

/// One product of a pass, of rows.
at::Tensor product(const Products& products, Pass pass, const Operand& rows, const Operand& weight);

class PulledGather {
 public:
  /// part: [B, S/N, F]; `rows`: the same as Products::part made it. With a scale for the whole the cast
  /// travels in place of the values.
  PulledGather(const SequenceExchange& exchange, const Operand& rows, const at::Tensor& part);

  /// Whether parts are still to come, and these products may take them one by one.
  bool multiplies_parts(const Products& products, Pass pass) const {
    return gather_ && (scale_.defined() || products.multiplies_rows_apart(pass));
  }
  /// [B, S, features]: each part by `weight` when it is there.
  at::Tensor multiply_parts(const Products& products, Pass pass, const Operand& weight, int64_t features);
  /// Rows [B * S, F], when all have come.
  const Operand& whole();
  bool complete() const { return !gather_; }

 private:
  template <class Use>
  void take_parts(const Use& use);
  Operand operand_of(const at::Tensor& travelled) const;

  int count_;
  std::vector<int64_t> sizes_;  // of the whole
  at::ScalarType dtype_, travels_as_;
  at::Tensor scale_;  // undefined: the values travel
  std::unique_ptr<SequenceExchange::Gather> gather_;
  at::Tensor arrived_;  // [B, S, F], while parts are on their way
  Operand whole_;
};

}  // namespace titan::ops
