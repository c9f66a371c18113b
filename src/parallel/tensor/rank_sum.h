#pragma once

#include <ATen/core/Tensor.h>

namespace titan::tp {

/// A sum over ranks, in the order in which they are added, which is theirs: every run has the same bits.
/// 16-bit summands are added in fp32.
class RankSum {
 public:
  void add(const at::Tensor& summand) {
    if (sum_.defined()) {
      sum_.add_(summand);
      return;
    }
    dtype_ = summand.scalar_type();
    sum_ = summand.element_size() < 4 ? summand.to(at::kFloat) : summand.clone();
  }
  /// In the summands' dtype.
  at::Tensor result() const { return sum_.to(dtype_); }

 private:
  at::ScalarType dtype_ = at::kFloat;
  at::Tensor sum_;
};

}  // namespace titan::tp
