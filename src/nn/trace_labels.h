#pragma once

// Module names as ranges in the traces of LibTorch's profiler.

#include <cstddef>

#include "titan/nn/hooks.h"

namespace titan::nn {

class BackwardRanges;

/// Whether a trace is the only user of a module's label slot.
bool only_traces(const std::shared_ptr<CallHook>& label_hook);

/// Labels a model's modules in traces as long as the object exists. Each call of a hookable module below
/// `root` is a range with the module's dotted name, "layers.3.attention". A model's layers
/// (nn::LayerSequence) also have a range for their backward, "layers.3 backward". Linear layers whose
/// products are computed together share one, "layers.3.attention.wq+wk+wv". The computation and its order
/// don't change. The hook is in the modules' label slots, around an existing hook. Don't create or destroy
/// the object while a forward runs.
class TraceLabels {
 public:
  explicit TraceLabels(const AnyRef& root);
  ~TraceLabels();
  TraceLabels(TraceLabels&&) noexcept = default;
  TraceLabels& operator=(TraceLabels&&) = delete;

 private:
  std::vector<std::shared_ptr<torch::nn::Module>> modules_;  // keeps them alive
  std::shared_ptr<BackwardRanges> backward_;                 // null: moved from
};

/// At its end, closes the ranges that modules opened on this thread during the scope and left open. It is for
/// callers that end a module's forward with an exception and continue.
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
