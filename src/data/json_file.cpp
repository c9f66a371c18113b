#include "json_file.h"

#include <algorithm>

namespace titan::data {
namespace {

constexpr size_t kMaxDepth = 64;

/// How deep lists and objects nest; of text that isn't JSON, any number.
size_t depth_of(std::string_view text) {
  size_t depth = 0, deepest = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '"') in_string = !in_string;
    if (in_string) {
      if (c == '\\') ++i;
    } else if (c == '[' || c == '{') {
      deepest = std::max(deepest, ++depth);
    } else if ((c == ']' || c == '}') && depth > 0) {
      --depth;
    }
  }
  return deepest;
}

}  // namespace

JsonFile::JsonFile(std::filesystem::path path, const std::string& text) : path_(std::move(path)) {
  if (depth_of(text) > kMaxDepth) refuse(str("nested deeper than ", kMaxDepth));
  // The parser takes a NUL for the end of its input.
  if (text.find('\0') != text.npos) refuse("contains a NUL byte");
  tree_ = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!tree_.is_object()) refuse("not a JSON object");
}

}  // namespace titan::data
