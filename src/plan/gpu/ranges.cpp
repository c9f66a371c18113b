#include "plan/gpu/ranges.h"

#include <array>
#include <string_view>
#include <vector>

#include <ATen/record_function.h>

namespace titan::plan {

namespace {

thread_local std::vector<std::string> open_ranges;

// As CollectiveRange names them in src/dist/collectives.cpp.
bool is_of_collective(std::string_view name) {
  static constexpr std::array<std::string_view, 9> beginnings = {"all_gather", "reduce_scatter", "all_reduce",
                                                                 "broadcast",  "all_to_all",     "send",
                                                                 "receive",    "barrier",        "wait "};
  for (const std::string_view beginning : beginnings)
    if (name.starts_with(beginning)) return true;
  return false;
}

std::unique_ptr<at::ObserverContext> enter(const at::RecordFunction& range) {
  open_ranges.emplace_back(range.name());
  return nullptr;
}

void leave(const at::RecordFunction& /*range*/, at::ObserverContext* /*context*/) {
  if (!open_ranges.empty()) open_ranges.pop_back();
}

}  // namespace

RangeWatch::RangeWatch()
    : handle_(at::addGlobalCallback(
          at::RecordFunctionCallback(enter, leave).scopes({at::RecordScope::USER_SCOPE}))) {}

RangeWatch::~RangeWatch() { at::removeCallback(handle_); }

std::string current_module() {
  for (auto range = open_ranges.rbegin(); range != open_ranges.rend(); ++range)
    if (!is_of_collective(*range)) return *range;
  return "";
}

std::string current_call() {
  return open_ranges.empty() || !is_of_collective(open_ranges.back()) ? "" : open_ranges.back();
}

}  // namespace titan::plan
