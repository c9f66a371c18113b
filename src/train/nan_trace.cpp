#include "titan/train/nan_trace.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <exception>
#include <functional>
#include <limits>
#include <mutex>
#include <string>
#include <unordered_set>

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/isinf.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/masked_select.h>
#include <ATen/ops/view_as_real.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include "tensor/param_storage.h"
#include "titan/core/error.h"
#include "train/module_probes.h"

namespace titan::train {

/// Where in a run a trace finds something: asked for by the threads of a backward while training sets it.
class TracePlace {
 public:
  explicit TracePlace(int rank) : rank_(rank) {}
  void set_step(int64_t step) { step_ = step; }
  /// "step 7, rank 1"
  std::string where() const { return str("step ", step_.load(), ", rank ", rank_); }

 private:
  int rank_;
  std::atomic<int64_t> step_{0};
};

bool is_finite(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.numel() == 0 || tensor.is_meta() || is_deferred(tensor)) return true;
  if (!at::isFloatingType(tensor.scalar_type()) && !at::isComplexType(tensor.scalar_type())) return true;
  const at::NoGradGuard no_grad;
  return at::isfinite(tensor).all().item<bool>();
}

std::string describe_numbers(const at::Tensor& tensor) {
  if (!tensor.defined()) return "none";
  const std::string type = titan::str(tensor.scalar_type(), " ", tensor.sizes());
  if (tensor.is_meta() || is_deferred(tensor)) return type + ", without memory";
  if (tensor.numel() == 0) return type + ", empty";
  const at::NoGradGuard no_grad;
  const bool is_complex = at::isComplexType(tensor.scalar_type());
  const at::Tensor parts = is_complex ? at::view_as_real(tensor.detach().resolve_conj()) : tensor.detach();
  const at::Tensor values = parts.to(at::kDouble);
  const at::Tensor finite = values.masked_select(at::isfinite(values));
  const std::string counts = titan::str(at::isnan(values).sum().item<int64_t>(), " NaN, ",
                                        at::isinf(values).sum().item<int64_t>(), " Inf");
  if (finite.numel() == 0) return titan::str(type, ": ", counts);
  return titan::str(type, ": min ", finite.min().item<double>(), ", max ", finite.max().item<double>(),
                    ", mean ", finite.mean().item<double>(), ", ", counts);
}

// [Note: who made it]
// Modules are checked innermost first, in the forward as in the backward, so the first to find a number that
// isn't finite made it, unless it was given one. In the backward a module sees its own part alone: its inputs
// pass through a node of the probe's, so that what other users of the same tensor add comes behind that.

class NanTrace::State : public TracePlace {
 public:
  State(int rank, OnFinding on_finding) : TracePlace(rank), on_finding_(on_finding) {}

  /// Before each look; false: there is nothing left to look for.
  bool looks() {
    ++num_looked_at_;
    return !has_found_;
  }
  std::optional<NanFinding> first() const {
    const std::lock_guard lock(mutex_);
    return first_;
  }
  /// `numbers`: what to say of the tensors, behind the finding's text. Takes memory, which may be short.
  void found(NanFinding finding, const std::function<std::string()>& numbers) {
    if (on_finding_ == OnFinding::Throw) throw Error(finding.text + numbers());
    try {
      finding.text += numbers();
    } catch (const std::exception&) {
      finding.text += "\n  (its numbers couldn't be looked at)";
    }
    const std::lock_guard lock(mutex_);
    finding.num_looked_at = num_looked_at_;
    if (!first_) first_ = std::move(finding);
    has_found_ = true;
  }

 private:
  OnFinding on_finding_;
  mutable std::mutex mutex_;  // a backward has threads
  std::optional<NanFinding> first_;
  std::atomic<bool> has_found_{false};
  std::atomic<int64_t> num_looked_at_{0};
};

namespace {

using nn::TensorList;
using nn::TensorRefs;
using torch::autograd::Node;
using torch::autograd::variable_list;
using StatePtr = std::shared_ptr<NanTrace::State>;

bool all_finite(const TensorList& tensors) { return std::all_of(tensors.begin(), tensors.end(), is_finite); }

std::string list(const char* what, const TensorList& tensors) {
  std::string text;
  for (size_t i = 0; i < tensors.size(); ++i)
    text += str("\n  ", what, " ", i, ": ", describe_numbers(tensors[i]));
  return text;
}

// Those that are there: a group's are gathered for its modules only.
std::string list_parameters(const torch::nn::Module& module) {
  std::string text;
  for (const auto& parameter : module.named_parameters(/*recurse=*/false))
    text += str("\n  ", parameter.key(), ": ", describe_numbers(parameter.value()));
  return text;
}

/// One call of a module: what its forward was given, and its backward.
struct TracedCall {
  StatePtr state;
  size_t model;
  std::string module;
  std::weak_ptr<torch::nn::Module> parameters;
  TensorList inputs;     // detached
  TensorList gradients;  // of its outputs, as they come
};

void blame_backward(const TracedCall& call, const variable_list& gradients) {
  const auto module = call.parameters.lock();
  call.state->found(
      {.text = str(call.state->where(), ": the backward of module ", call.module,
                   " is the first to give a gradient that isn't finite"),
       .made_by_module = true,
       .in_backward = true,
       .model = call.model},
      [&] {
        return list("gradient of input", gradients) + list("it was given: gradient", call.gradients) +
               list("its forward's input", call.inputs) + (module ? list_parameters(*module) : "");
      });
}

void check_gradient_of_output(TracedCall& call, const at::Tensor& gradient) {
  if (!call.state->looks()) return;
  call.gradients.push_back(gradient);
  if (is_finite(gradient)) return;
  call.state->found(
      {.text = str(call.state->where(), ": the gradient of the output of module ", call.module,
                   " isn't finite, and no module behind it gave such: it was made between them, by the loss, "
                   "or on another rank"),
       .in_backward = true,
       .model = call.model},
      [&] { return list("gradient of output", {gradient}); });
}

class InputProbe : public Node {
 public:
  explicit InputProbe(std::shared_ptr<TracedCall> call) : call_(std::move(call)) {}
  variable_list apply(variable_list&& gradients) override {
    if (call_->state->looks() && !all_finite(gradients)) blame_backward(*call_, gradients);
    call_->gradients.clear();
    return std::move(gradients);
  }
  std::string name() const override { return "NanTraceInput"; }

 private:
  std::shared_ptr<TracedCall> call_;
};

void probe_inputs(const TensorRefs& inputs, const std::shared_ptr<TracedCall>& call) {
  std::vector<at::Tensor*> with_gradient;
  for (at::Tensor* input : inputs)
    if (input->requires_grad()) with_gradient.push_back(input);
  if (with_gradient.empty()) return;
  auto node = std::make_shared<InputProbe>(call);
  torch::autograd::edge_list edges;
  for (at::Tensor* input : with_gradient) edges.push_back(torch::autograd::impl::gradient_edge(*input));
  node->set_next_edges(std::move(edges));
  for (at::Tensor* input : with_gradient) {
    at::Tensor passed = input->detach();
    torch::autograd::set_history(passed, node);
    *input = std::move(passed);
  }
}

void probe_outputs(const TensorRefs& outputs, const std::shared_ptr<TracedCall>& call) {
  for (at::Tensor* output : outputs)
    if (output->requires_grad())
      output->register_hook(
          [call](const at::Tensor& gradient) { check_gradient_of_output(*call, gradient); });
}

class NanProbe final : public ModuleProbe {
 public:
  NanProbe(StatePtr state, size_t model, std::shared_ptr<nn::CallHook> inner)
      : ModuleProbe(std::move(inner)), state_(std::move(state)), model_(model) {}
  bool is_of(const StatePtr& state) const { return state_ == state; }

 protected:
  void before(nn::HookHost& host, const TensorRefs& inputs) override {
    inputs_.clear();
    for (const at::Tensor* input : inputs) inputs_.push_back(input->detach());
    call_ = std::make_shared<TracedCall>(
        TracedCall{state_, model_, module_name(host), host.as_module().weak_from_this(), inputs_, {}});
    if (at::GradMode::is_enabled()) probe_inputs(inputs, call_);
  }
  void after(nn::HookHost& host, const TensorRefs& outputs) override {
    check_outputs(host, outputs);
    if (at::GradMode::is_enabled()) probe_outputs(outputs, call_);
    inputs_.clear();
    call_.reset();
  }

 private:
  void check_outputs(nn::HookHost& host, const TensorRefs& outputs) const {
    if (!state_->looks()) return;
    TensorList values;
    for (const at::Tensor* output : outputs) values.push_back(output->detach());
    if (all_finite(values)) return;
    const bool of_finite = all_finite(inputs_);
    const char* given =
        of_finite ? ", though its inputs are"
                  : ", nor are its inputs: they were made between modules or came from another rank";
    state_->found(
        {.text = str(state_->where(), ": the output of module ", module_name(host),
                     " is the first that isn't finite", given),
         .made_by_module = of_finite,
         .model = model_},
        [&] { return list("output", values) + list("input", inputs_) + list_parameters(host.as_module()); });
  }

  StatePtr state_;
  size_t model_;
  // Of the call that runs. One that an exception ended leaves them to the next.
  TensorList inputs_;
  std::shared_ptr<TracedCall> call_;
};

}  // namespace

NanTrace::NanTrace(const std::vector<nn::AnyRef>& models, int rank, OnFinding on_finding)
    : models_(models), state_(std::make_shared<State>(rank, on_finding)) {
  for (size_t model = 0; model < models_.size(); ++model)
    add_probes({models_[model]},
               [&](auto inner) { return std::make_shared<NanProbe>(state_, model, std::move(inner)); });
}

NanTrace::~NanTrace() {
  remove_probes(models_, [&](const nn::CallHook& hook) {
    const auto* probe = dynamic_cast<const NanProbe*>(&hook);
    return probe && probe->is_of(state_);
  });
}

void NanTrace::set_step(int64_t step) { state_->set_step(step); }

std::optional<NanFinding> NanTrace::first() const { return state_->first(); }

// [Note: labels for nodes]
// When a module's forward ends, the nodes that it recorded are those behind its outputs with a sequence
// number from its time. Each that no inner module has labelled yet gets a hook with the module's name, which
// runs after the node in the backward.

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
