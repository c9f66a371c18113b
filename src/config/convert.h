#pragma once

// From what stands in a file or on the command line to a value that a field takes.

#include <string>
#include <string_view>

#include "config/document.h"
#include "titan/config/table.h"

namespace titan::config {

struct Converted {
  Value value;
  std::string problem;  ///< empty: `value` is right for the field
};

/// Checks type, constraint and refusal; a refusal that holds only where another key is true is left to the
/// caller.
Converted convert(const FieldInfo& field, const Raw& raw);

/// "not supported: <reason>; only false is accepted".
std::string refusal(const FieldInfo& field);

/// A command-line word as the field's kind reads it: "none" unsets, "a,b" is a list, "a,b;c" a list of lists.
/// A word that doesn't fit the kind stays a string, which convert() then refuses.
Raw raw_of_word(const FieldInfo& field, std::string_view word);

/// "an int", "a list of strings".
std::string with_article(Kind kind);

}  // namespace titan::config
