#pragma once

// A config file before anybody has looked at what its keys mean: the same for TOML and JSON.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace titan::config {

/// file:line:column, both from 1.
struct Place {
  std::string file;
  size_t line = 0;
  size_t column = 0;
};
std::string to_text(const Place& place);

/// What stands in the file: a scalar, a list, null, or something that no setting can be.
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
  std::string name;  ///< full, with dots; a component that holds a dot itself is quoted
  Place place;
  Raw value;
};

struct Heading {
  std::string name;
  Place place;
};

struct Document {
  std::vector<Leaf> leaves;       ///< in the order of the file
  std::vector<Heading> headings;  ///< every table, its parent before it
  std::vector<std::string> problems;
};

/// Throws ConfigError for what isn't TOML; its position as "file:line:column: reason".
Document read_toml(std::string_view text, const std::string& file);
/// The same for JSON. A key given twice is a problem of the document, as in TOML.
Document read_json(std::string_view text, const std::string& file);

/// "prefix.key", the key quoted where it isn't plain.
std::string joined(const std::string& prefix, std::string_view key);

/// Moves `place` over `text`. Columns count characters (UTF-8), as toml++ does.
void move(Place& place, std::string_view text);

/// Deepest nesting and most bytes that a config may have: beyond, it is an attack or a mistake.
inline constexpr size_t kMaxDepth = 64;
inline constexpr size_t kMaxBytes = size_t{16} << 20;

// "This key was given this value there", for all files and the command line, in order of precedence: the last
// one wins.

/// A word of the command line as it stands; unset for a bare `--name`.
using Word = std::optional<std::string>;

struct Assignment {
  std::string name;
  std::string place;  ///< "file:line:column"; empty on the command line
  std::variant<Raw, Word> given;
};

/// "configs/a.toml:3:1: training.steps = 0" or "--training.steps = 0": the beginning of every message about
/// it.
std::string to_text(const Assignment& assignment);

/// The file with all that it includes, included first. What can't be read becomes a problem, and the rest is
/// still returned.
std::vector<Document> read_documents(const std::filesystem::path& file, std::vector<std::string>& problems);

/// Command-line words as assignments, names with '_' for '-'.
std::vector<Assignment> read_words(const std::vector<std::string>& words, std::vector<std::string>& problems);

}  // namespace titan::config
