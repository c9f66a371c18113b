// The command line's `--section.key value` words.

#include <algorithm>

#include "assignments.h"
#include "titan/config/load.h"
#include "titan/config/value.h"
#include "titan/core/error.h"

namespace titan::config {
namespace {

bool is_name(const std::string& word) { return word.starts_with("--") && word.size() > 2; }

std::string normalized(std::string name) {
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

/// Takes the name at `at`, and the value that follows unless '=' gave one; moves `at` behind both.
Assignment take(const std::vector<std::string>& words, size_t& at) {
  std::string word = words[at++].substr(2);
  size_t equals = word.find('=');
  if (equals != std::string::npos)
    return {normalized(word.substr(0, equals)), "", Word(word.substr(equals + 1))};
  bool has_value = at < words.size() && !is_name(words[at]);
  return {normalized(word), "", has_value ? Word(words[at++]) : Word()};
}

/// Arguments are bytes; settings are text, which is written to files that have to be UTF-8.
bool is_utf8(std::string_view text) {
  for (size_t at = 0; at < text.size();) {
    unsigned char lead = static_cast<unsigned char>(text[at++]);
    size_t tail = lead < 0x80                   ? 0
                  : lead >= 0xc2 && lead < 0xe0 ? 1
                  : (lead & 0xf0) == 0xe0       ? 2
                  : (lead & 0xf8) == 0xf0       ? 3
                                                : 4;
    if (tail == 4 || at + tail > text.size()) return false;
    for (; tail > 0; --tail, ++at)
      if ((static_cast<unsigned char>(text[at]) & 0xc0) != 0x80) return false;
  }
  return true;
}

}  // namespace

std::vector<Assignment> read_words(const std::vector<std::string>& words,
                                   std::vector<std::string>& problems) {
  for (size_t at = 0; at < words.size(); ++at)
    if (!is_utf8(words[at])) problems.push_back(str("command-line word ", at + 1, " is not UTF-8"));
  std::vector<Assignment> assignments;
  for (size_t at = 0; at < words.size();) {
    if (is_name(words[at])) {
      assignments.push_back(take(words, at));
    } else {
      problems.push_back(str("'", words[at++], "': expected --section.key"));
    }
  }
  return assignments;
}

std::optional<std::string> override_value(const std::vector<std::string>& words, std::string_view name) {
  std::optional<std::string> found;
  for (size_t at = 0; at < words.size();) {
    if (!is_name(words[at])) {
      ++at;
      continue;
    }
    Assignment assignment = take(words, at);
    if (assignment.name == name) found = std::get<Word>(assignment.given);
  }
  return found;
}

}  // namespace titan::config
