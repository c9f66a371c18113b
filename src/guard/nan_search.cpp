// [Note: finding the module]
// Modules are checked innermost first, in the forward and in the backward, so the first module with a
// non-finite number made it, unless it received one. In the backward a module sees only its own part: its
// inputs pass through a node of the probe, so that gradients from other users of the same tensor are added
// after the check.
//
// [Note: labels for nodes]
// When a module's forward ends, the autograd nodes that it recorded are those that its outputs reach and
// whose sequence numbers were assigned during it. Each one that no inner module has labeled gets a hook with
// the module's name, which runs after the node in the backward.

#include "titan/guard/nan_search.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <functional>
#include <mutex>
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
#include <torch/nn/module.h>

#include "guard/module_probes.h"
#include "ops/autograd_node.h"
#include "tensor/memory.h"
#include "titan/core/error.h"

namespace titan::train {

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

const Parameter* first_nonfinite_gradient(const std::vector<Parameter>& parameters) {
  for (const Parameter& parameter : parameters)
    if (!is_finite(parameter.data.local.grad())) return &parameter;
  return nullptr;
}

/// Shared by the probes, and by the threads of a backward.
class NanSearch::State {
 public:
  explicit State(const Options& given) : options(given) {}

  const Options options;
  std::atomic<int64_t> step{0};

  /// "step 7, rank 1"
  std::string where() const { return titan::str("step ", step.load(), ", rank ", options.rank); }

  /// Counts a check. False: there already is a finding, so nothing needs to be checked.
  bool start_check() {
    ++num_checked_;
    return !has_found_;
  }
  std::optional<NanFinding> first() const {
    const std::lock_guard lock(mutex_);
    return first_;
  }
  /// `numbers` describes the tensors, for the end of the text. It allocates memory, which may fail.
  void found(NanFinding finding, const std::function<std::string()>& numbers) {
    if (options.on_finding == OnFinding::Throw) throw Error(finding.text + numbers());
    try {
      finding.text += numbers();
    } catch (const std::exception&) {
      finding.text += "\n  (cannot read its numbers)";
    }
    const std::lock_guard lock(mutex_);
    finding.num_checked = num_checked_;
    if (!first_) first_ = std::move(finding);
    has_found_ = true;
  }

 private:
  mutable std::mutex mutex_;
  std::optional<NanFinding> first_;
  std::atomic<bool> has_found_{false};
  std::atomic<int64_t> num_checked_{0};
};

namespace {

using nn::TensorList;
using nn::TensorRefs;
using torch::autograd::AnomalyMode;
using torch::autograd::Node;
using torch::autograd::variable_list;
using StatePtr = std::shared_ptr<NanSearch::State>;

bool all_finite(const TensorList& tensors) { return std::all_of(tensors.begin(), tensors.end(), is_finite); }

std::string list(const char* what, const TensorList& tensors) {
  std::string text;
  for (size_t i = 0; i < tensors.size(); ++i)
    text += titan::str("\n  ", what, " ", i, ": ", describe_numbers(tensors[i]));
  return text;
}

// Only the module's own parameters: a group of FSDP is gathered only for its own modules.
std::string list_parameters(const torch::nn::Module& module) {
  std::string text;
  for (const auto& parameter : module.named_parameters(/*recurse=*/false))
    text += titan::str("\n  ", parameter.key(), ": ", describe_numbers(parameter.value()));
  return text;
}

TensorList detached(const TensorRefs& tensors) {
  TensorList copies;
  for (const at::Tensor* tensor : tensors) copies.push_back(tensor->detach());
  return copies;
}

/// One call of a module: the tensors that its forward and its backward received.
struct SearchedCall {
  StatePtr state;
  size_t model;
  std::string module;
  std::weak_ptr<torch::nn::Module> parameters;
  TensorList inputs;     // detached
  TensorList gradients;  // for its outputs, in order of arrival
};

void blame_backward(const SearchedCall& call, const variable_list& gradients) {
  const auto module = call.parameters.lock();
  call.state->found(
      {.text = titan::str(call.state->where(), ": the backward of module ", call.module,
                          " is the first to produce a gradient that isn't finite"),
       .made_by_module = true,
       .in_backward = true,
       .model = call.model},
      [&] {
        return list("gradient of input", gradients) + list("it received: gradient", call.gradients) +
               list("its forward's input", call.inputs) + (module ? list_parameters(*module) : "");
      });
}

void check_gradient_of_output(SearchedCall& call, const at::Tensor& gradient) {
  if (!call.state->start_check()) return;
  call.gradients.push_back(gradient);
  if (is_finite(gradient)) return;
  call.state->found(
      {.text = titan::str(call.state->where(), ": the gradient of the output of module ", call.module,
                          " isn't finite, and no later module produced such a gradient: it arose between "
                          "modules, in the loss, or on another rank"),
       .in_backward = true,
       .model = call.model},
      [&] { return list("gradient of output", {gradient}); });
}

class InputProbe : public Node {
 public:
  explicit InputProbe(std::shared_ptr<SearchedCall> call) : call_(std::move(call)) {}
  variable_list apply(variable_list&& gradients) override {
    if (call_->state->start_check() && !all_finite(gradients)) blame_backward(*call_, gradients);
    call_->gradients.clear();
    return std::move(gradients);
  }
  std::string name() const override { return "NanSearchInput"; }

 private:
  std::shared_ptr<SearchedCall> call_;
};

void probe_outputs(const TensorRefs& outputs, const std::shared_ptr<SearchedCall>& call) {
  for (at::Tensor* output : outputs)
    if (output->requires_grad())
      output->register_hook(
          [call](const at::Tensor& gradient) { check_gradient_of_output(*call, gradient); });
}

/// A hook on one autograd node, which owns it.
class LabeledNode final : public torch::autograd::FunctionPostHook {
 public:
  LabeledNode(Node& node, std::string module, StatePtr state)
      : node_(node), module_(std::move(module)), state_(std::move(state)) {}

  variable_list operator()(const variable_list& returned, const variable_list& received) override {
    if (all_finite(returned) || !all_finite(received)) return returned;
    if (AnomalyMode::is_enabled()) node_.metadata()->print_stack(node_.name());
    throw Error(titan::str(
        state_->where(), ": the backward of ", node_.name(), ", which the forward of module ", module_,
        " recorded, produced a non-finite gradient from finite ones",
        list("it returned: gradient of input", returned), list("it received: gradient of output", received)));
  }

 private:
  Node& node_;
  std::string module_;
  StatePtr state_;
};

bool is_labeled(const Node& node) {
  return std::ranges::any_of(node.post_hooks(),
                             [](const auto& hook) { return dynamic_cast<const LabeledNode*>(hook.get()); });
}

// A leaf's node belongs to no forward.
bool is_of_forward(const Node& node, uint64_t first_number) {
  return node.sequence_nr() >= first_number && node.sequence_nr() != UINT64_MAX;
}

void label_nodes(const TensorRefs& outputs, uint64_t first_number, const std::string& module,
                 const StatePtr& state) {
  std::vector<Node*> left;
  for (const at::Tensor* output : outputs)
    if (output->grad_fn()) left.push_back(output->grad_fn().get());
  std::unordered_set<Node*> seen;
  while (!left.empty()) {
    Node* node = left.back();
    left.pop_back();
    if (!is_of_forward(*node, first_number) || !seen.insert(node).second) continue;
    if (!is_labeled(*node)) node->add_post_hook(std::make_unique<LabeledNode>(*node, module, state));
    for (const auto& edge : node->next_edges())
      if (edge.is_valid()) left.push_back(edge.function.get());
  }
}

class NanProbe final : public ModuleProbe {
 public:
  NanProbe(StatePtr state, size_t model, std::shared_ptr<nn::CallHook> inner)
      : ModuleProbe(std::move(inner)), state_(std::move(state)), model_(model) {}
  bool is_of(const StatePtr& state) const { return state_ == state; }

 protected:
  void before(nn::HookHost& host, const TensorRefs& inputs) override {
    if (state_->options.modules) {
      inputs_ = detached(inputs);
      call_ = std::make_shared<SearchedCall>(
          SearchedCall{state_, model_, module_name(host), host.as_module().weak_from_this(), inputs_, {}});
      if (at::GradMode::is_enabled()) ops::insert_identity(std::make_shared<InputProbe>(call_), inputs);
    }
    first_number_ = at::sequence_number::peek();
  }
  void after(nn::HookHost& host, const TensorRefs& outputs) override {
    if (state_->options.operations && at::GradMode::is_enabled())
      label_nodes(outputs, first_number_, module_name(host), state_);
    if (!state_->options.modules) return;
    check_outputs(host, outputs);
    if (at::GradMode::is_enabled()) probe_outputs(outputs, call_);
    inputs_.clear();
    call_.reset();
  }

 private:
  void check_outputs(nn::HookHost& host, const TensorRefs& outputs) const {
    if (!state_->start_check()) return;
    const TensorList values = detached(outputs);
    if (all_finite(values)) return;
    const bool made_here = all_finite(inputs_);
    const char* inputs = made_here
                             ? ", though its inputs are"
                             : ", nor are its inputs: they arose between modules or came from another rank";
    state_->found(
        {.text = titan::str(state_->where(), ": the output of module ", module_name(host),
                            " is the first that isn't finite", inputs),
         .made_by_module = made_here,
         .model = model_},
        [&] { return list("output", values) + list("input", inputs_) + list_parameters(host.as_module()); });
  }

  StatePtr state_;
  size_t model_;
  // The current call's. If an exception ends it, they stay here until the next call.
  TensorList inputs_;
  std::shared_ptr<SearchedCall> call_;
  uint64_t first_number_ = 0;
};

}  // namespace

NanSearch::NanSearch(const std::vector<nn::AnyRef>& models, const Options& options)
    : models_(models),
      state_(std::make_shared<State>(options)),
      anomaly_mode_was_on_(AnomalyMode::is_enabled()) {
  if (options.operations) AnomalyMode::set_enabled(true, /*check_nan=*/true);
  for (size_t model = 0; model < models_.size(); ++model)
    add_probes({models_[model]},
               [&](auto inner) { return std::make_shared<NanProbe>(state_, model, std::move(inner)); });
}

NanSearch::~NanSearch() {
  if (state_->options.operations) AnomalyMode::set_enabled(anomaly_mode_was_on_);
  remove_probes(models_, [&](const nn::CallHook& hook) {
    const auto* probe = dynamic_cast<const NanProbe*>(&hook);
    return probe && probe->is_of(state_);
  });
}

void NanSearch::set_step(int64_t step) { state_->step = step; }

std::optional<NanFinding> NanSearch::first() const { return state_->first(); }

// By now the gradients are summed over the ranks.
void NanSearch::check_gradients(const std::vector<Parameter>& parameters) const {
  const Parameter* parameter = first_nonfinite_gradient(parameters);
  if (!parameter) return;
  const at::Tensor& values = parameter->data.local;
  throw Error(titan::str(
      state_->where(), ": the gradient of parameter '", parameter->name,
      "' is the first that isn't finite, and no module of this rank produced such a "
      "gradient: it arose in the parameter's own operation, or on another rank that shares it",
      "\n  gradient: ", describe_numbers(values.grad()), "\n  parameter: ", describe_numbers(values)));
}

}  // namespace titan::train
