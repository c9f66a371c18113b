#pragma once

#include <memory>
#include <string>

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

}  // namespace titan::nn
