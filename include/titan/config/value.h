#pragma once

// The values that a config can hold, and how TOML and JSON write them.

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace titan::config {

using StringList = std::vector<std::string>;

/// Every value that a config file can hold. An optional field that is unset is std::monostate.
using Value =
    std::variant<std::monostate, bool, int64_t, double, std::string, StringList, std::vector<StringList>>;

/// The type of a field, and so the alternative of Value that it holds.
enum class Kind { Bool, Int, Float, String, StringList, StringLists };

/// "bool", "int", "float", "string", "list of strings", "list of lists of strings".
std::string_view name_of(Kind kind);

/// The kind of a set value; String for std::monostate, which has none.
Kind kind_of(const Value& value);

/// As TOML writes it, and JSON too but for infinities: strings quoted and escaped, floats in the shortest
/// form that reads back to the same double and is still a float (`1.0`, `8e-4`); std::monostate is `unset`.
std::string to_text(const Value& value);

/// A string with quotes and escapes that TOML and JSON share.
std::string quoted(std::string_view text);

}  // namespace titan::config
