#pragma once

// Where a backward starts: an output's place in the graph, without its memory.

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>

namespace titan::train {

/// Keeps the graph behind a tensor, and not the tensor: what a stage has sent needn't stay for its backward.
class GraphRoot {
 public:
  GraphRoot() = default;
  explicit GraphRoot(const at::Tensor& output);
  /// Nothing behind the output requires a gradient.
  bool empty() const { return !edge_.is_valid(); }
  /// From `grad`, of the output's shape and dtype; the graph is gone then.
  void backward(const at::Tensor& grad);

 private:
  torch::autograd::Edge edge_;
};

}  // namespace titan::train
