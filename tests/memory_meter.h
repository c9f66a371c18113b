#pragma once

// Measures the tensor memory that a scope allocates.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

namespace titan::testing {

/// The growth of this thread's tensor memory since the start of the scope, in bytes, of all devices or of a
/// kind of them. A backward on a GPU's thread counts, too.
class MemoryMeter {
 public:
  explicit MemoryMeter(std::optional<c10::DeviceType> type = std::nullopt)
      : state_(std::make_shared<State>(type)), guard_(c10::DebugInfoKind::PROFILER_STATE, state_) {}
  int64_t bytes() const { return state_->bytes; }
  int64_t peak() const { return state_->peak; }

 private:
  struct State : c10::MemoryReportingInfoBase {
    explicit State(std::optional<c10::DeviceType> type) : type(type) {}
    void reportMemoryUsage(void* /*ptr*/, int64_t size, size_t /*total*/, size_t /*reserved*/,
                           c10::Device device) override {
      if (type && device.type() != *type) return;
      bytes += size;
      peak = std::max(peak, bytes);
    }
    bool memoryProfilingEnabled() const override { return true; }
    const std::optional<c10::DeviceType> type;
    int64_t bytes = 0, peak = 0;
  };
  std::shared_ptr<State> state_;
  c10::DebugInfoGuard guard_;
};

}  // namespace titan::testing
