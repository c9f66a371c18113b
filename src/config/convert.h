#pragma once

// Converts a value from a file or the command line to a field's type.

#include <string>
#include <string_view>

#include "config/document.h"
#include "titan/config/table.h"

namespace titan::config {

struct Converted {
  Value value;
  std::string problem;  ///< empty if `value` is valid
};

/// Checks type, constraint and refusal. The caller checks refusals that depend on another key.
Converted convert(const FieldInfo& field, const Raw& raw);

/// "not supported: <reason>; only false is accepted".
std::string refusal(const FieldInfo& field);

/// Parses a command-line word for the field's kind: "none" unsets, "a,b" is a list, "a,b;c" a list of lists.
/// A word that doesn't fit stays a string, which convert() refuses.
Raw raw_of_word(const FieldInfo& field, std::string_view word);

/// "an int", "a list of strings".
std::string with_article(Kind kind);

}  // namespace titan::config
