#pragma once

// Named ranges in traces of LibTorch's profiler (observe/profiling.h turns it on).

#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include <ATen/record_function.h>

namespace titan::dist {

/// From here to the end of the scope. Where nobody profiles it costs a look at two thread-local lists, and
/// the name isn't made.
class TraceRange {
 public:
  /// `name()`: what to convert to a string_view, or a string.
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

// Collectives in a trace, on the CPU's side: "all_gather fsdp::all_gather layers.3", with bytes and group. A
// device's own part is NCCL's to record.

struct CallRecord;

/// Around a call's launch, or the wait for it.
class CollectiveRange {
 public:
  enum class Part { Launch, Wait };
  CollectiveRange(Part part, const CallRecord& call, int group_size);
  CollectiveRange(const CollectiveRange&) = delete;
  CollectiveRange& operator=(const CollectiveRange&) = delete;

 private:
  std::optional<at::RecordFunction> record_;
};

}  // namespace titan::dist
