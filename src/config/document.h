#pragma once

// [Note: from files to settings]
// A Document is a parsed TOML or JSON file, before its keys mean anything: leaves with a dotted name, a place
// and a Raw value. An Assignment is a leaf or a command-line word: "this key was given this value there".
// load.cpp looks up each assignment's field in the Catalog, converts its value, and sets it.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "titan/config/load.h"

namespace titan::config {

/// file:line:column, both from 1.
struct Place {
  std::string file;
  size_t line = 0;
  size_t column = 0;
};
std::string to_text(const Place& place);

/// A value in a file: a scalar, a list, null, or something that no setting accepts.
struct Raw {
  struct Null {};
  struct Other {
    std::string what;  ///< "a date", "a table"
  };
  using List = std::vector<Raw>;
  std::variant<Null, bool, int64_t, double, std::string, List, Other> value;
};
std::string to_text(const Raw& raw);
/// "an int", "a list", ...
std::string type_of(const Raw& raw);

struct Leaf {
  std::string name;  ///< full, with dots; a component that contains a dot is quoted
  Place place;
  Raw value;
};

/// One table of a list of tables, [[name]]; the list is a leaf, too. No setting accepts it.
struct Row {
  std::string name;
  std::vector<Leaf> leaves;  ///< named within the table
};

struct Heading {
  std::string name;
  Place place;
};

struct Document {
  std::vector<Leaf> leaves;       ///< in the order of the file
  std::vector<Heading> headings;  ///< every table, after its parent
  std::vector<Row> rows;          ///< TOML's lists of tables
  std::vector<std::string> problems;
};

/// Throws ConfigError, "file:line:column: reason", if the text isn't TOML.
Document read_toml(std::string_view text, const std::string& file);
/// The same for JSON. A duplicate key is one of the document's problems.
Document read_json(std::string_view text, const std::string& file);

/// "prefix.key"; a key with characters other than letters, digits, '_' and '-' is quoted.
std::string joined(const std::string& prefix, std::string_view key);

/// The limits on a config's nesting and its size in bytes.
inline constexpr size_t kMaxDepth = 64;
inline constexpr size_t kMaxBytes = size_t{16} << 20;

/// A value on the command line; unset for a bare `--name`.
using Word = std::optional<std::string>;

struct Assignment {
  std::string name;
  std::string place;  ///< "file:line:column"; empty on the command line
  std::variant<Raw, Word> given;
};

/// The file and everything it includes, in order of precedence: the last one wins. Files that can't be read
/// are added to `problems`, and the others are returned.
std::vector<Document> read_documents(const std::filesystem::path& file, std::vector<std::string>& problems);

/// Command-line words as assignments; '-' in names becomes '_'.
std::vector<Assignment> read_words(const std::vector<std::string>& words, std::vector<std::string>& problems);

/// Calls `visit` for every field of a job, dynamic ones too, in the schema's order.
using FieldVisitor =
    std::function<void(const std::string& name, const FieldInfo& field, const void* settings)>;
void for_each_field(const Schema& schema, const void* job, const FieldVisitor& visit);

/// "not supported: <reason>", or "not supported with <key>: <reason>".
std::string unsupported_text(const FieldInfo& field);

}  // namespace titan::config
