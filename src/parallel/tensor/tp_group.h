#pragma once

// The ranks of a tensor-parallel axis, and the moves of activations among them.

#include <cstdint>
#include <memory>
#include <string>

#include <ATen/core/Tensor.h>

#include "parallel/scratch.h"
#include "titan/dist/collectives.h"
#include "titan/dist/device_mesh.h"
#include "titan/ops/linear.h"

namespace titan::tp {

class TpGroup {
 public:
  explicit TpGroup(const DeviceMesh& axis);

  int index() const { return group_->rank(); }
  int count() const { return group_->size(); }

  /// The parts along `dim` put together; `whole` is the size that they come to (torch.chunk's parts), -1: all
  /// are as long as this rank's.
  at::Tensor gather(const at::Tensor& part, int64_t dim, int64_t whole, dist::Label label) const;
  /// This rank's part along `dim` of the sum of all ranks' tensors.
  at::Tensor reduce_scatter(const at::Tensor& summand, int64_t dim, dist::Label label) const;
  /// The sum of all ranks' tensors, in memory of its own: autograd may have kept the summand.
  at::Tensor all_reduce(const at::Tensor& summand, dist::Label label) const;
  /// This rank's part along `dim`.
  at::Tensor slice(const at::Tensor& whole, int64_t dim) const;
  /// The inverse: zeros in the other ranks' places.
  at::Tensor unslice(const at::Tensor& part, int64_t dim, int64_t whole) const;

  const std::shared_ptr<dist::Group>& group() const { return group_; }

 private:
  std::shared_ptr<dist::Group> group_;
  // A collective has the parts in the order of the ranks, a batch interleaves them. One buffer holds the
  // former, as calls follow each other on one stream.
  mutable Scratch by_rank_;
};

// Traffic among the ranks of the axis, counted for plan_rows().

struct Traffic {
  int64_t calls = 0;
  int64_t bytes = 0;       ///< received by this rank
  std::string way;         ///< of an exchange of parts, in words
  const char* phase = "";  ///< of a module's own gathers: the last call's
};

/// The ranks of the axis for one module, whose gathers are counted.
class CountedParts final : public ops::RankParts {
 public:
  /// `module`: interned, for labels.
  CountedParts(std::shared_ptr<const TpGroup> parts, std::shared_ptr<Traffic> traffic, const char* module)
      : parts_(std::move(parts)), traffic_(std::move(traffic)), module_(module) {}

  int index() const override { return parts_->index(); }
  int count() const override { return parts_->count(); }
  void all_gather(const at::Tensor& out, const at::Tensor& in, const char* phase) const override {
    traffic_->calls += 1;
    traffic_->phase = phase;
    traffic_->bytes += static_cast<int64_t>(in.nbytes()) * (count() - 1);
    parts_->group()->all_gather(out, in, {phase, module_}).wait();
  }

 private:
  std::shared_ptr<const TpGroup> parts_;
  std::shared_ptr<Traffic> traffic_;
  const char* module_;
};

}  // namespace titan::tp
