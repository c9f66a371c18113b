#pragma once

// What an operation needs to know when a matrix that it multiplies by is spread over ranks. Process groups
// are behind it (parallel/tensor), so that ops don't know of them.

#include <cstdint>
#include <memory>

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

}  // namespace titan::ops
