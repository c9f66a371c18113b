#pragma once

// Collectives in a trace, on the CPU's side: "all_gather fsdp::all_gather layers.3", with bytes and group. A
// device's own part is NCCL's to record.

#include <optional>

#include <ATen/record_function.h>

namespace titan::dist {

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
