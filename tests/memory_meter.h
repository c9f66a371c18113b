#pragma once

// Measures the tensor memory that a scope allocates.

#include <algorithm>
#include <cstdint>
#include <memory>

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

namespace titan::testing {

/// The growth of this thread's tensor memory since the start of the scope, in bytes.
class MemoryMeter {
 public:
  MemoryMeter() : guard_(c10::DebugInfoKind::PROFILER_STATE, state_) {}
  int64_t bytes() const { return state_->bytes; }
  int64_t peak() const { return state_->peak; }

 private:
  struct State : c10::MemoryReportingInfoBase {
    void reportMemoryUsage(void* /*ptr*/, int64_t size, size_t /*total*/, size_t /*reserved*/,
                           c10::Device /*device*/) override {
      bytes += size;
      peak = std::max(peak, bytes);
    }
    bool memoryProfilingEnabled() const override { return true; }
    int64_t bytes = 0, peak = 0;
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
  c10::DebugInfoGuard guard_;
};

}  // namespace titan::testing
