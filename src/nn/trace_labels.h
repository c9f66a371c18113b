#pragma once

// Module names as ranges in the traces of LibTorch's profiler.

#include <cstddef>

#include "titan/nn/hooks.h"

namespace titan::nn {

class BackwardRanges;

/// Whether a trace is the only user of a module's label slot.
bool only_traces(const std::shared_ptr<CallHook>& label_hook);

/// Labels a model's modules in traces as long as the object exists: each call of a hookable module below
/// `root` is a range under the module's dotted name, "layers.3.attention". A model's layers
/// (nn::LayerSequence) have one for their backward too, "layers.3 backward". Linear layers whose products are
/// computed together share one, "layers.3.attention.wq+wk+wv". Nothing else changes, neither what is computed
/// nor its order. The hook sits in the modules' label slots, around one that is there already. Don't create
/// or destroy it while a forward runs.
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

/// At its end, closes the ranges that modules opened on this thread in the scope and left open: for callers
/// that end a module's forward by an exception and carry on.
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
