// A config file and its includes, as documents in order of precedence.

#include <algorithm>

#include "assignments.h"
#include "titan/config/value.h"
#include "titan/core/error.h"
#include "titan/core/file.h"

namespace titan::config {
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

  /// `prefix` goes in front of the reason when the file itself can't be read: who asked for it.
  void read(const fs::path& path, const std::string& prefix) {
    if (is_open(path)) return report(prefix, "includes go round in a circle: " + chain_to(path));
    if (++num_files_ > kMostFiles) return report(prefix, str("more than ", kMostFiles, " included files"));
    Document document;
    try {
      document = read_document(path);
    } catch (const ConfigError& error) {  // says where by itself
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

  static bool is_same_file(const fs::path& a, const fs::path& b) {
    std::error_code ignored;
    return fs::equivalent(a, b, ignored);
  }

  bool is_open(const fs::path& path) const {
    return std::any_of(open_.begin(), open_.end(),
                       [&](const fs::path& open) { return is_same_file(open, path); });
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

}  // namespace titan::config
