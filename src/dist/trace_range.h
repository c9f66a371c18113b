#pragma once

// Named ranges in traces of LibTorch's profiler (observe/profiling.h turns it on).

#include <optional>
#include <string_view>
#include <utility>

#include <ATen/record_function.h>

namespace titan::dist {

/// A range from here to the end of the scope. Without a profiler it costs a look at two thread-local lists
/// and builds no name.
class TraceRange {
 public:
  /// `name()` returns a string, or something that converts to a string_view.
  template <class Name>
  explicit TraceRange(const Name& name) {
    auto recorders = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
    if (!recorders.has_value()) return;
    record_.emplace(std::move(*recorders));
    const auto text = name();
    record_->before(std::string_view(text));
  }
  TraceRange(const TraceRange&) = delete;
  TraceRange& operator=(const TraceRange&) = delete;

 private:
  std::optional<at::RecordFunction> record_;
};

}  // namespace titan::dist
