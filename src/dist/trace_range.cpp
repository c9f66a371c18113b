#include "dist/trace_range.h"

#include <string>
#include <unordered_map>

#include <ATen/core/ivalue.h>

#include "dist/flight_record.h"
#include "titan/core/error.h"

namespace titan::dist {
namespace {

std::string range_name(CollectiveRange::Part part, const CallRecord& call) {
  return titan::str(part == CollectiveRange::Part::Wait ? "wait " : "", name_of(call.op),
                    *call.phase ? " " : "", call.phase, *call.module ? " " : "", call.module);
}

}  // namespace

CollectiveRange::CollectiveRange(Part part, const CallRecord& call, int group_size) {
  auto recorders = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
  if (!recorders.has_value()) return;
  record_.emplace(std::move(*recorders));
  const std::unordered_map<std::string, c10::IValue> details = {
      {"bytes", call.bytes},
      {"group", call.group->name},
      {"group_size", group_size},
      {"group_call", static_cast<int64_t>(call.sequence)},
      {"dtype", std::string(c10::toString(call.dtype))},
      {"peer", call.peer}};
  const std::string name = range_name(part, call);
  record_->before(std::string_view(name), &details);
}

}  // namespace titan::dist
