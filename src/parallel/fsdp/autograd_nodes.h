#pragma once

// Weight gradients that a backward delayed, with the groups that will take them.

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "titan/nn/hooks.h"
#include "titan/ops/linear.h"

namespace titan::fsdp {

class ParamGroup;

class DelayedQueue {
 public:
  void add(std::shared_ptr<ParamGroup> group, size_t slot, ops::WeightGrad grad);
  void add(std::shared_ptr<ParamGroup> group, size_t slot, ops::DueGradient gradient);
  void compute();
  size_t size() const { return entries_.size(); }
  int64_t bytes() const;

 private:
  struct Entry {
    std::shared_ptr<ParamGroup> group;
    size_t slot;
    ops::WeightGrad product;  // without products: `other` is it
    ops::DueGradient other = {};
  };
  std::vector<Entry> entries_;
};

// FSDP's nodes in the autograd graph: after each compute parameter, and around each group's module.

class ParamGroup;

/// Makes gradients of `compute` arrive at group->take_grad(slot). `compute` becomes a non-leaf.
void attach_gradient_node(const at::Tensor& compute, std::weak_ptr<ParamGroup> group, size_t slot);

/// Takes the weight gradients of products around autograd.
class GroupSink : public ops::GradSink {
 public:
  GroupSink(std::weak_ptr<ParamGroup> group, size_t slot) : group_(std::move(group)), slot_(slot) {}
  void accept(ops::WeightGrad grad) override;
  void accept(const at::Tensor& grad_OI, const at::Tensor& scale) override;
  void accept(ops::DueGradient gradient) override;

 private:
  std::weak_ptr<ParamGroup> group_;
  size_t slot_;
};

/// Replaces the inputs that require gradients by the outputs of one identity node: `done` is called when
/// the gradients of all of them are there, i.e. when the module's backward is over. False when no input
/// requires a gradient.
bool call_after_backward(const nn::TensorRefs& inputs, std::function<void()> done);

/// Calls `needed` when the gradient of one of the outputs arrives. False when none requires one.
bool call_before_backward(const nn::TensorRefs& outputs, const std::function<void()>& needed);

}  // namespace titan::fsdp
