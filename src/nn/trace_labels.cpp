// [Note: ranges of a trace]
// A range opens in a module's pre_forward and closes in its post_forward; in between it is on a per-thread
// stack. A forward that ends with an exception leaves its range on the stack; the enclosing module, or a
// TraceLabelScope, closes it together with its own.
//
// A layer's backward begins when the gradient of its output arrives and ends when that of its input does, as
// seen by hooks on the tensors. Layers run one after the other, so only one range is open at a time.

#include "nn/trace_labels.h"

#include <algorithm>

#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <torch/nn/module.h>

#include "titan/nn/containers.h"
#include "titan/nn/hooks.h"

namespace titan::nn {

/// The open range of one model's backward.
class BackwardRanges {
 public:
  void begin(const std::string& module) {
    record_ = std::make_unique<at::RecordFunction>(at::RecordScope::USER_SCOPE);
    module_ = module;
    record_->before(std::string_view(module + " backward"));
  }
  void end(const std::string& module) {
    if (module == module_) close();
  }
  void close() {
    record_.reset();
    module_.clear();
  }

 private:
  std::unique_ptr<at::RecordFunction> record_;
  std::string module_;
};

namespace {

struct OpenRange {
  const HookHost* host = nullptr;
  bool with_backward = false;
  at::RecordFunction record{at::RecordScope::USER_SCOPE};
};

thread_local std::vector<std::unique_ptr<OpenRange>> open_ranges;

OpenRange& open_range(const HookHost& host) {
  auto range = std::make_unique<OpenRange>();
  range->host = &host;
  range->record.before(std::string_view(host.fqn().empty() ? "model" : host.fqn()));
  open_ranges.push_back(std::move(range));
  return *open_ranges.back();
}

void close_ranges_down_to(size_t count) {
  while (open_ranges.size() > count) open_ranges.pop_back();
}

// The first tensor that gradients flow through.
at::Tensor* differentiable(const TensorRefs& tensors) {
  const auto found =
      std::find_if(tensors.begin(), tensors.end(), [](at::Tensor* each) { return each->requires_grad(); });
  return found == tensors.end() ? nullptr : *found;
}

/// A label hook that opens the profiler's ranges around `inner`, the hook that was in the slot before.
class TraceHook final : public CallHook {
 public:
  /// `backward`: null unless this module's backward gets a range, too.
  TraceHook(std::shared_ptr<CallHook> inner, std::shared_ptr<BackwardRanges> backward)
      : inner_(std::move(inner)), backward_(std::move(backward)) {}

  const std::shared_ptr<CallHook>& inner() const { return inner_; }

  void pre_forward(HookHost& host, const TensorRefs& inputs) override {
    OpenRange& range = open_range(host);
    if (inner_) inner_->pre_forward(host, inputs);
    at::Tensor* input = backward_ && at::GradMode::is_enabled() ? differentiable(inputs) : nullptr;
    if (!input) return;
    range.with_backward = true;
    input->register_hook(
        [ranges = backward_, module = host.fqn()](const at::Tensor& /*gradient*/) { ranges->end(module); });
  }

  void post_forward(HookHost& host, const TensorRefs& outputs) override {
    if (inner_) inner_->post_forward(host, outputs);
    const auto range = std::find_if(open_ranges.rbegin(), open_ranges.rend(),
                                    [&](const auto& each) { return each->host == &host; });
    if (range == open_ranges.rend()) return;
    at::Tensor* output = (*range)->with_backward ? differentiable(outputs) : nullptr;
    if (output)
      output->register_hook([ranges = backward_, module = host.fqn()](const at::Tensor& /*gradient*/) {
        ranges->begin(module);
      });
    close_ranges_down_to(static_cast<size_t>(open_ranges.rend() - range - 1));
  }

 private:
  std::shared_ptr<CallHook> inner_;
  std::shared_ptr<BackwardRanges> backward_;
};

}  // namespace

bool only_traces(const std::shared_ptr<CallHook>& label_hook) {
  const auto* tracing = dynamic_cast<const TraceHook*>(label_hook.get());
  return tracing && !tracing->inner();
}

TraceLabels::TraceLabels(const AnyRef& root) : backward_(std::make_shared<BackwardRanges>()) {
  std::vector<std::string> layers;
  if (const LayerSequence* sequence = layer_sequence(root)) layers = sequence->layer_names().all();
  const auto label = [&](const std::shared_ptr<torch::nn::Module>& module) {
    auto* host = dynamic_cast<HookHost*>(module.get());
    if (!host) return;
    const bool is_layer = std::find(layers.begin(), layers.end(), host->fqn()) != layers.end();
    host->label_hook = std::make_shared<TraceHook>(host->label_hook, is_layer ? backward_ : nullptr);
    modules_.push_back(module);
  };
  label(root.ptr());
  for (const auto& module : root.module().modules(/*include_self=*/false)) label(module);
}

// Labels that were added to a module later stay, because they contain this one's hook.
TraceLabels::~TraceLabels() {
  if (!backward_) return;
  backward_->close();
  for (const auto& module : modules_) {
    std::shared_ptr<CallHook>& hook = dynamic_cast<HookHost&>(*module).label_hook;
    if (const auto* tracing = dynamic_cast<const TraceHook*>(hook.get())) {
      std::shared_ptr<CallHook> inner = tracing->inner();
      hook = std::move(inner);
    }
  }
}

TraceLabelScope::TraceLabelScope() : num_open_(open_ranges.size()) {}
TraceLabelScope::~TraceLabelScope() { close_ranges_down_to(num_open_); }

}  // namespace titan::nn
