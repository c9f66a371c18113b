// [Note: labels for nodes]
// When a module's forward ends, the nodes that it recorded are those behind its outputs with a sequence
// number from its time. Each that no inner module has labelled yet gets a hook with the module's name, which
// runs after the node in the backward.

#include <algorithm>
#include <atomic>
#include <unordered_set>

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>

#include "titan/core/error.h"
#include "titan/train/nan_trace.h"
#include "train/module_probes.h"
#include "train/trace_place.h"

namespace titan::train {

class AnomalyTrace::State : public TracePlace {
 public:
  using TracePlace::TracePlace;
};

namespace {

using nn::TensorRefs;
using torch::autograd::AnomalyMode;
using torch::autograd::Node;
using torch::autograd::variable_list;
using AnomalyStatePtr = std::shared_ptr<AnomalyTrace::State>;

bool are_finite(const variable_list& tensors) {
  return std::all_of(tensors.begin(), tensors.end(), is_finite);
}

std::string list_gradients(const char* what, const variable_list& tensors) {
  std::string text;
  for (size_t i = 0; i < tensors.size(); ++i)
    text += str("\n  ", what, " ", i, ": ", describe_numbers(tensors[i]));
  return text;
}

/// Of one node, which owns it.
class LabelledNode final : public torch::autograd::FunctionPostHook {
 public:
  LabelledNode(Node& node, std::string module, AnomalyStatePtr state)
      : node_(node), module_(std::move(module)), state_(std::move(state)) {}

  variable_list operator()(const variable_list& gave, const variable_list& given) override {
    if (are_finite(gave) || !are_finite(given)) return gave;
    if (AnomalyMode::is_enabled()) node_.metadata()->print_stack(node_.name());
    throw Error(str(state_->where(), ": in the backward of ", node_.name(), ", which the forward of module ",
                    module_, " recorded, a gradient isn't finite that was made of finite ones",
                    list_gradients("it gave: gradient of input", gave),
                    list_gradients("it was given: gradient of output", given)));
  }

 private:
  Node& node_;
  std::string module_;
  AnomalyStatePtr state_;
};

bool is_labelled(const Node& node) {
  return std::any_of(node.post_hooks().begin(), node.post_hooks().end(),
                     [](const auto& hook) { return dynamic_cast<const LabelledNode*>(hook.get()); });
}

// A leaf's node is of no forward.
bool is_of_forward(const Node& node, uint64_t first_number) {
  return node.sequence_nr() >= first_number && node.sequence_nr() != UINT64_MAX;
}

void label_nodes(const TensorRefs& outputs, uint64_t first_number, const std::string& module,
                 const AnomalyStatePtr& state) {
  std::vector<Node*> left;
  for (const at::Tensor* output : outputs)
    if (output->grad_fn()) left.push_back(output->grad_fn().get());
  std::unordered_set<Node*> seen;
  while (!left.empty()) {
    Node* node = left.back();
    left.pop_back();
    if (!is_of_forward(*node, first_number) || !seen.insert(node).second) continue;
    if (!is_labelled(*node)) node->add_post_hook(std::make_unique<LabelledNode>(*node, module, state));
    for (const auto& edge : node->next_edges())
      if (edge.is_valid()) left.push_back(edge.function.get());
  }
}

class AnomalyProbe final : public ModuleProbe {
 public:
  AnomalyProbe(AnomalyStatePtr state, std::shared_ptr<nn::CallHook> inner)
      : ModuleProbe(std::move(inner)), state_(std::move(state)) {}
  bool is_of(const AnomalyStatePtr& state) const { return state_ == state; }

 protected:
  void before(nn::HookHost& /*host*/, const TensorRefs& /*inputs*/) override {
    first_number_ = at::sequence_number::peek();
  }
  void after(nn::HookHost& host, const TensorRefs& outputs) override {
    if (at::GradMode::is_enabled()) label_nodes(outputs, first_number_, module_name(host), state_);
  }

 private:
  AnomalyStatePtr state_;
  uint64_t first_number_ = 0;
};

}  // namespace

AnomalyTrace::AnomalyTrace(const std::vector<nn::AnyRef>& models, int rank)
    : models_(models), state_(std::make_shared<State>(rank)), was_on_(AnomalyMode::is_enabled()) {
  AnomalyMode::set_enabled(true, /*check_nan=*/true);
  add_probes(models_, [&](auto inner) { return std::make_shared<AnomalyProbe>(state_, std::move(inner)); });
}

AnomalyTrace::~AnomalyTrace() {
  AnomalyMode::set_enabled(was_on_);
  remove_probes(models_, [&](const nn::CallHook& hook) {
    const auto* probe = dynamic_cast<const AnomalyProbe*>(&hook);
    return probe && probe->is_of(state_);
  });
}

void AnomalyTrace::set_step(int64_t step) { state_->set_step(step); }

}  // namespace titan::train
