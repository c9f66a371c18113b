#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "titan/nn/hooks.h"

namespace titan::nn {

class BackwardRanges;

/// A label hook that opens ranges of the profiler. `inner`: the slot's own hook.
class TraceHook final : public CallHook {
 public:
  /// `backward`: where this module's backward is a range too, else null.
  TraceHook(std::shared_ptr<CallHook> inner, std::shared_ptr<BackwardRanges> backward);
  void pre_forward(HookHost& host, const TensorRefs& inputs) override;
  void post_forward(HookHost& host, const TensorRefs& outputs) override;
  const std::shared_ptr<CallHook>& inner() const { return inner_; }

 private:
  std::shared_ptr<CallHook> inner_;
  std::shared_ptr<BackwardRanges> backward_;
};

/// True where nobody but a trace wants to see a module's calls.
bool only_traces(const std::shared_ptr<CallHook>& label_hook);

// Module names in the traces of LibTorch's profiler.

/// While it lives, each call of a hookable module below `root` is a range of the profiler under the module's
/// dotted name: "layers.3.attention". A model's layers (nn::LayerSequence) have one for their backward too,
/// "layers.3 backward". Linear layers whose products are computed together share one,
/// "layers.3.attention.wq+wk+wv". Calls are what they are without it: nothing else is computed, nor in
/// another order. It sits in the modules' label slots, around a hook that is there already, and goes with the
/// object; not while a forward runs.
class TraceLabels {
 public:
  explicit TraceLabels(const AnyRef& root);
  ~TraceLabels();
  TraceLabels(TraceLabels&&) noexcept;
  TraceLabels& operator=(TraceLabels&&) = delete;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Ends, at the end of the scope, what ranges modules have begun on this thread since and not ended: for
/// whoever stops a module's forward by an exception and goes on.
class TraceLabelScope {
 public:
  TraceLabelScope();
  ~TraceLabelScope();
  TraceLabelScope(const TraceLabelScope&) = delete;
  TraceLabelScope& operator=(const TraceLabelScope&) = delete;

 private:
  size_t num_open_;
};

}  // namespace titan::nn
