#include "checkpoint/state_name.h"

#include <algorithm>

#include "data/utf8.h"
#include "titan/core/error.h"

namespace titan::checkpoint::detail {
namespace {

constexpr size_t kMaxNameBytes = 1000;
constexpr std::string_view kMetadataKey = "__metadata__";  // of safetensors headers

bool is_control(char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; }

}  // namespace

std::string name_problem(std::string_view name) {
  if (name.empty()) return "is empty";
  if (name.size() > kMaxNameBytes)
    return str("has ", name.size(), " bytes; at most ", kMaxNameBytes, " are allowed");
  // Before the name is shown.
  if (std::any_of(name.begin(), name.end(), is_control)) return "contains control characters";
  if (data::valid_utf8_prefix(name) != name.size()) return "isn't UTF-8";
  for (std::string_view part : {"/", "\\", ".."})
    if (name.find(part) != std::string_view::npos) return str("'", name, "' contains '", part, "'");
  if (name == kMetadataKey) return str("'", name, "' is one that safetensors keeps for itself");
  return "";
}

}  // namespace titan::checkpoint::detail
