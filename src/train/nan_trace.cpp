// [Note: who made it]
// Modules are checked innermost first, in the forward as in the backward, so the first to find a number that
// isn't finite made it, unless it was given one. In the backward a module sees its own part alone: its inputs
// pass through a node of the probe's, so that what other users of the same tensor add comes behind that.

#include "titan/train/nan_trace.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <functional>
#include <mutex>

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include "titan/core/error.h"
#include "train/module_probes.h"
#include "train/trace_place.h"

namespace titan::train {

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

}  // namespace titan::train
