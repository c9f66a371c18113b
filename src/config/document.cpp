#include "config/document.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <set>

#include "core/file.h"
#include "core/json.h"
#include "core/utf8.h"
#include "titan/config/load.h"
#include "titan/config/table.h"
#include "titan/core/error.h"

namespace titan::config {
namespace {

template <class... Cases>
struct Overloaded : Cases... {
  using Cases::operator()...;
};
template <class... Cases>
Overloaded(Cases...) -> Overloaded<Cases...>;

bool is_plain(std::string_view key) {
  auto plain = [](unsigned char c) { return std::isalnum(c) || c == '_' || c == '-'; };
  return !key.empty() && std::all_of(key.begin(), key.end(), plain);
}

std::string list_text(const Raw::List& list) {
  std::string text;
  for (const Raw& item : list) text += (text.empty() ? "" : ", ") + to_text(item);
  return "[" + text + "]";
}

}  // namespace

std::string to_text(const Place& place) { return str(place.file, ":", place.line, ":", place.column); }

std::string to_text(const Raw& raw) {
  return std::visit(Overloaded{[](Raw::Null) -> std::string { return "null"; },
                               [](const Raw::List& list) { return list_text(list); },
                               [](const Raw::Other& other) { return "<" + other.what + ">"; },
                               [](const auto& scalar) { return to_text(Value(scalar)); }},
                    raw.value);
}

std::string type_of(const Raw& raw) {
  if (const auto* other = std::get_if<Raw::Other>(&raw.value)) return other->what;
  if (const auto* real = std::get_if<double>(&raw.value); real != nullptr && std::isnan(*real)) return "nan";
  constexpr const char* kTypes[] = {"null", "a bool", "an int", "a float", "a string", "a list"};
  return kTypes[raw.value.index()];
}

std::string joined(const std::string& prefix, std::string_view key) {
  std::string component = is_plain(key) ? std::string(key) : config::quoted(key);
  return prefix.empty() ? component : prefix + "." + component;
}

// ---- JSON
namespace {

class JsonReader final : public JsonEvents {
 public:
  JsonReader(std::string_view text, const std::string& file) : text_(text), cursor_{file, 1, 1} {}

  std::string null() override { return value({Raw::Null{}}); }
  std::string boolean(bool given) override { return value({given}); }
  std::string integer(int64_t given) override { return value({given}); }
  std::string large_integer(uint64_t given) override { return value({static_cast<double>(given)}); }
  std::string real(double given) override { return value({given}); }
  std::string text(std::string& given) override { return value({std::move(given)}); }

  std::string key(std::string& name) override {
    if (skipped_ == 0) {
      key_ = joined(open_.back().name, name);
      key_place_ = token_place();
    }
    return token_done();
  }

  std::string open(bool is_array) override {
    if (is_array && open_.empty()) return no_object();
    if (open_.size() + skipped_ >= kMaxDepth)
      return problem(token_place(), str("nested deeper than ", kMaxDepth));
    const bool in_list = !open_.empty() && open_.back().is_list;
    if (skipped_ > 0 || (in_list && !is_array)) {
      ++skipped_;
    } else {
      if (!is_array && !open_.empty()) {
        note_key();
        document.headings.push_back({key_, key_place_});
      }
      open_.push_back({key_, key_place_, is_array});
    }
    return token_done();
  }

  std::string close() override {
    if (skipped_ > 0) {
      if (--skipped_ == 0) open_.back().items.push_back({Raw::Other{"a table"}});
      return token_done();
    }
    Open closed = std::move(open_.back());
    open_.pop_back();
    if (!closed.is_list) return token_done();
    key_ = std::move(closed.name);
    key_place_ = std::move(closed.place);
    return value({std::move(closed.items)});
  }

  std::string syntax_error(size_t position, const std::string& reason) override {
    return problem(advance_to(position > 0 ? position - 1 : 0), "not JSON: " + reason);
  }

  Document document;

 private:
  struct Open {
    std::string name = {};
    Place place = {};
    bool is_list = false;
    Raw::List items = {};
    std::set<std::string> keys = {};
  };

  std::string value(Raw raw) {
    if (open_.empty()) return no_object();
    if (skipped_ == 0 && open_.back().is_list) {
      open_.back().items.push_back(std::move(raw));
    } else if (skipped_ == 0 && note_key()) {
      document.leaves.push_back({key_, key_place_, std::move(raw)});
    }
    return token_done();
  }

  /// Returns false, and adds a problem, if the open object already has the key.
  bool note_key() {
    if (open_.back().keys.insert(key_).second) return true;
    document.problems.push_back(str(to_text(key_place_), ": ", key_, ": given twice in the same table"));
    return false;
  }

  std::string problem(const Place& place, const std::string& reason) const {
    return str(to_text(place), ": ", reason);
  }
  std::string no_object() const {
    return problem(cursor_, "a config is an object: {\"section\": {\"key\": value}}");
  }

  // The parser has read just past the current token (and one byte more after a number, which can't start a
  // token), so the token starts after the end of the previous one and the separators.
  Place token_place() {
    return advance_to(std::min(text_.find_first_not_of(" \t\r\n,:", last_end_), text_.size()));
  }
  std::string token_done() {
    last_end_ = num_read();
    return "";
  }

  /// Moves the cursor to a byte. Tokens come in order, so each byte is counted once. Columns count UTF-8
  /// characters, as toml++ does.
  Place advance_to(size_t offset) {
    for (; cursor_at_ < std::min(offset, text_.size()); ++cursor_at_) {
      if (text_[cursor_at_] == '\n') {
        ++cursor_.line;
        cursor_.column = 1;
      } else if (starts_character(text_[cursor_at_])) {
        ++cursor_.column;
      }
    }
    return cursor_;
  }

  std::string_view text_;
  std::vector<Open> open_;
  size_t skipped_ = 0;  // open objects and lists inside an object in a list, which holds no settings
  std::string key_;
  Place key_place_;
  size_t last_end_ = 0;
  Place cursor_;
  size_t cursor_at_ = 0;
};

}  // namespace

Document read_json(std::string_view text, const std::string& file) {
  JsonReader reader(text, file);
  const std::string problem = titan::read_json(text, reader);
  if (!problem.empty()) throw ConfigError(problem);
  return std::move(reader.document);
}

// ---- a file and its includes

namespace {

namespace fs = std::filesystem;

constexpr size_t kMostFiles = 1000;  // includes of includes can double at every level
constexpr const char* kInclude = "include";

Document read_document(const fs::path& path) {
  std::string name = path.string();
  bool json = path.extension() == ".json";
  if (!json && path.extension() != ".toml") throw Error(str(name, ": a config file ends in .toml or .json"));
  std::error_code ignored;
  auto size = fs::file_size(path, ignored);
  if (!ignored && size > kMaxBytes)
    throw Error(str(name, ": ", size, " bytes are too many for a config (at most ", kMaxBytes, ")"));
  std::string text = read_file(path);
  return json ? read_json(text, name) : read_toml(text, name);
}

class FileReader {
 public:
  explicit FileReader(std::vector<std::string>& problems) : problems_(problems) {}

  /// `prefix` names the place of the include; it begins the message if the file can't be read.
  void read(const fs::path& path, const std::string& prefix) {
    if (is_open(path)) return report(prefix, "circular include: " + chain_to(path));
    if (++num_files_ > kMostFiles) return report(prefix, str("more than ", kMostFiles, " included files"));
    Document document;
    try {
      document = read_document(path);
    } catch (const ConfigError& error) {  // its message has the place
      return report("", error.what());
    } catch (const Error& error) {
      return report(prefix, error.what());
    }
    open_.push_back(path);
    read_includes(document, path);
    open_.pop_back();
    problems_.insert(problems_.end(), document.problems.begin(), document.problems.end());
    documents_.push_back(std::move(document));
  }

  std::vector<Document> take() { return std::move(documents_); }

 private:
  void read_includes(Document& document, const fs::path& path) {
    auto is_include = [](const Leaf& leaf) { return leaf.name == kInclude; };
    auto found = std::find_if(document.leaves.begin(), document.leaves.end(), is_include);
    if (found == document.leaves.end()) return;
    Leaf include = std::move(*found);
    document.leaves.erase(found);
    std::string prefix = str(to_text(include.place), ": include = ", to_text(include.value), ": ");
    for (const std::string& file : names_in(include, prefix))
      read((path.parent_path() / file).lexically_normal(), prefix);
  }

  StringList names_in(const Leaf& include, const std::string& prefix) {
    StringList names;
    const auto* list = std::get_if<Raw::List>(&include.value.value);
    for (const Raw& item : list != nullptr ? *list : Raw::List{}) {
      const auto* name = std::get_if<std::string>(&item.value);
      if (name != nullptr) names.push_back(*name);
    }
    if (list == nullptr || names.size() != list->size()) report(prefix, "must be a list of file names");
    return names;
  }

  bool is_open(const fs::path& path) const {
    std::error_code ignored;
    return std::any_of(open_.begin(), open_.end(),
                       [&](const fs::path& open) { return fs::equivalent(open, path, ignored); });
  }

  std::string chain_to(const fs::path& path) const {
    std::string chain;
    for (const fs::path& open : open_) chain += open.string() + " -> ";
    return chain + path.string();
  }

  void report(const std::string& prefix, const std::string& reason) { problems_.push_back(prefix + reason); }

  std::vector<std::string>& problems_;
  std::vector<Document> documents_;
  std::vector<fs::path> open_;
  size_t num_files_ = 0;
};

}  // namespace

std::vector<Document> read_documents(const fs::path& file, std::vector<std::string>& problems) {
  FileReader reader(problems);
  reader.read(file, "");
  return reader.take();
}

// ---- words of the command line

namespace {

bool is_name(const std::string& word) { return word.starts_with("--") && word.size() > 2; }

std::string normalized(std::string name) {
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

/// Takes the name at `at`, and the value that follows unless '=' gave one; moves `at` past both.
Assignment take(const std::vector<std::string>& words, size_t& at) {
  std::string word = words[at++].substr(2);
  size_t equals = word.find('=');
  if (equals != std::string::npos)
    return {normalized(word.substr(0, equals)), "", Word(word.substr(equals + 1))};
  bool has_value = at < words.size() && !is_name(words[at]);
  return {normalized(word), "", has_value ? Word(words[at++]) : Word()};
}

}  // namespace

std::vector<Assignment> read_words(const std::vector<std::string>& words,
                                   std::vector<std::string>& problems) {
  for (size_t at = 0; at < words.size(); ++at)
    if (valid_utf8_prefix(words[at]) != words[at].size())
      problems.push_back(str("command-line word ", at + 1, " is not UTF-8"));
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
