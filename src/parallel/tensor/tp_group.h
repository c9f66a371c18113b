#pragma once

// The ranks of a tensor-parallel axis, and the moves of activations among them.

#include <cstdint>
#include <memory>

#include <ATen/core/Tensor.h>

#include "titan/dist/collectives.h"
#include "titan/dist/device_mesh.h"

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
  at::Tensor scratch(at::IntArrayRef sizes, const at::TensorOptions& options) const;

  std::shared_ptr<dist::Group> group_;
  // Parts lie rank by rank on the wire, and interleaved in a batch. One buffer for the former: calls follow
  // each other on one stream.
  mutable at::Tensor scratch_;
};

}  // namespace titan::tp
