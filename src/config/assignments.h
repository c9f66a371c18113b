#pragma once

// "This key was given this value there", for all files and the command line, in order of precedence: the last
// one wins.

#include <filesystem>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "document.h"

namespace titan::config {

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
