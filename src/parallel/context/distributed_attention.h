#pragma once

// What the forms of attention over ranks have in common: the autograd node.

#include <memory>

#include "parallel/context/sequence_layout.h"
#include "titan/dist/collectives.h"
#include "titan/nn/attention_core.h"
#include "titan/ops/attention.h"

namespace titan::context {

/// Attention as the ranks of a group compute it together. One serves all modules of a model, one call at a
/// time: its buffers are used again.
class DistributedAttention {
 public:
  explicit DistributedAttention(SequenceLayout layout) : layout_(layout) {}
  virtual ~DistributedAttention() = default;
  const SequenceLayout& layout() const { return layout_; }
  /// Of this rank's queries over the keys of all ranks.
  virtual ops::AttentionSum forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                    dist::Label label) = 0;
  /// `grad` and `out` are of this rank's queries; the result is whole for this rank's queries, keys and
  /// values. Summed in at least fp32; a gradient may come rounded to the dtype of what it is of.
  virtual ops::AttentionGradients backward(const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k,
                                           const at::Tensor& v, const at::Tensor& out,
                                           const at::Tensor& log_sum_exp, dist::Label label) = 0;

 private:
  SequenceLayout layout_;
};

/// For one module, whose name is in the records of collectives. `module` outlives the process's groups.
class ContextCore final : public nn::AttentionCore {
 public:
  ContextCore(std::shared_ptr<DistributedAttention> attention, const char* module)
      : attention_(std::move(attention)), module_(module) {}
  at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) override;

 private:
  std::shared_ptr<DistributedAttention> attention_;
  const char* module_;
};

}  // namespace titan::context
