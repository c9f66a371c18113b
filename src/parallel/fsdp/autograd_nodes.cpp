#include "parallel/fsdp/autograd_nodes.h"

#include <unordered_set>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include "parallel/fsdp/param_group.h"

namespace titan::fsdp {

void DelayedQueue::add(std::shared_ptr<ParamGroup> group, size_t slot, ops::WeightGrad grad) {
  entries_.push_back({std::move(group), slot, std::move(grad)});
}

void DelayedQueue::add(std::shared_ptr<ParamGroup> group, size_t slot, ops::DueGradient gradient) {
  entries_.push_back({std::move(group), slot, {}, std::move(gradient)});
}

// Each entry is freed once computed, so that memory falls on the way.
void DelayedQueue::compute() {
  for (Entry& entry : entries_) {
    const Entry due = std::move(entry);
    entry = {};
    due.group->take_grad(due.slot, due.other.compute ? due.other.compute() : due.product.compute(), {});
  }
  entries_.clear();
}

int64_t DelayedQueue::bytes() const {
  std::unordered_set<const void*> seen;
  int64_t total = 0;
  const auto count = [&](const at::Tensor& tensor) {
    if (tensor.defined() && seen.insert(tensor.storage().unsafeGetStorageImpl()).second)
      total += static_cast<int64_t>(tensor.storage().nbytes());
  };
  for (const Entry& entry : entries_) {
    for (const ops::Operand* operand : {&entry.product.grad_output_NO, &entry.product.input_NI})
      for (const at::Tensor* tensor :
           {&operand->values, &operand->along_rows.data, &operand->down_columns.data})
        count(*tensor);
    for (const at::Tensor& tensor : entry.other.reads) count(tensor);
  }
  return total;
}

namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

// Takes the place of a leaf's AccumulateGrad: runs before all other ready nodes, so that a group has its
// gradients before its module's backward is over.
class GradientNode : public Node {
 public:
  GradientNode(std::weak_ptr<ParamGroup> group, size_t slot)
      : Node(/*sequence_nr=*/UINT64_MAX), group_(std::move(group)), slot_(slot) {}

  variable_list apply(variable_list&& grads) override {
    const auto group = group_.lock();
    if (group && grads[0].defined()) group->take_grad(slot_, grads[0], {});
    return {};
  }
  std::string name() const override { return "FsdpGradient"; }

 private:
  std::weak_ptr<ParamGroup> group_;
  size_t slot_;
};

class AfterBackward : public Node {
 public:
  explicit AfterBackward(std::function<void()> done) : done_(std::move(done)) {}

  variable_list apply(variable_list&& grads) override {
    done_();
    return std::move(grads);
  }
  std::string name() const override { return "FsdpAfterBackward"; }

 private:
  std::function<void()> done_;
};

}  // namespace

void attach_gradient_node(const at::Tensor& compute, std::weak_ptr<ParamGroup> group, size_t slot) {
  auto node = std::make_shared<GradientNode>(std::move(group), slot);
  const uint32_t input = node->add_input_metadata(compute);
  at::Tensor(compute).set_requires_grad(false);
  torch::autograd::impl::set_gradient_edge(compute, {std::move(node), input});
}

void GroupSink::accept(ops::WeightGrad grad) {
  const auto group = group_.lock();
  if (!group) return;
  if (DelayedQueue* later = group->delayed()) return later->add(group, slot_, std::move(grad));
  group->take_grad(slot_, grad.compute(), {});
}

void GroupSink::accept(const at::Tensor& grad_OI, const at::Tensor& scale) {
  if (const auto group = group_.lock()) group->take_grad(slot_, grad_OI, scale);
}

void GroupSink::accept(ops::DueGradient gradient) {
  const auto group = group_.lock();
  if (!group) return;
  if (DelayedQueue* later = group->delayed()) return later->add(group, slot_, std::move(gradient));
  group->take_grad(slot_, gradient.compute(), {});
}

bool call_after_backward(const nn::TensorRefs& inputs, std::function<void()> done) {
  std::vector<at::Tensor*> with_gradient;
  for (at::Tensor* input : inputs)
    if (input->requires_grad()) with_gradient.push_back(input);
  if (with_gradient.empty()) return false;
  auto node = std::make_shared<AfterBackward>(std::move(done));
  torch::autograd::edge_list edges;
  for (at::Tensor* input : with_gradient) edges.push_back(torch::autograd::impl::gradient_edge(*input));
  node->set_next_edges(std::move(edges));
  for (at::Tensor* input : with_gradient) {
    at::Tensor passed = input->detach();
    torch::autograd::set_history(passed, node);
    *input = std::move(passed);
  }
  return true;
}

bool call_before_backward(const nn::TensorRefs& outputs, const std::function<void()>& needed) {
  bool any = false;
  for (at::Tensor* output : outputs) {
    if (!output->requires_grad()) continue;
    output->register_hook([needed](const at::Tensor&) { needed(); });
    any = true;
  }
  return any;
}

}  // namespace titan::fsdp
