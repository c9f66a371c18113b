#pragma once

// Module names in the traces of LibTorch's profiler.

#include <cstddef>
#include <memory>
#include <vector>

#include "titan/nn/any_ref.h"

namespace titan::nn {

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
