#include "titan/config/load.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "catalog.h"
#include "config/document.h"
#include "convert.h"

namespace titan::config {
namespace {

/// Long values are cut between UTF-8 characters, so that a message is one line.
std::string shortened(const std::string& text) {
  constexpr size_t kLongest = 100;
  if (text.size() <= kLongest) return text;
  size_t end = kLongest;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;
  return text.substr(0, end) + "...";
}

std::string shown_value(const Assignment& assignment) {
  if (const auto* raw = std::get_if<Raw>(&assignment.given)) return shortened(to_text(*raw));
  const Word& word = std::get<Word>(assignment.given);
  return word ? shortened(*word) : "";
}

/// nullopt for a bare `--name` whose field isn't a bool.
std::optional<Raw> raw_of(const Assignment& assignment, const FieldInfo& field) {
  if (const auto* raw = std::get_if<Raw>(&assignment.given)) return *raw;
  if (const Word& word = std::get<Word>(assignment.given)) return raw_of_word(field, *word);
  return field.kind == Kind::Bool ? std::optional<Raw>(Raw{true}) : std::nullopt;
}

/// Sorts assignments into settings, problems, and those that wait for a dynamic table.
class Loader {
 public:
  Loader(const Schema& schema, const Sources& sources, void* job)
      : schema_(schema), job_(job), catalog_(schema) {
    if (!sources.toml.empty())
      take_text(sources.toml, sources.file.string());
    else if (!sources.file.empty())
      for (const Document& document : read_documents(sources.file, problems_)) take(document);
    for (Assignment& assignment : read_words(sources.overrides, problems_)) take(std::move(assignment));
  }

  Origins run() {
    apply_static();
    for (const Section& section : schema_.sections())
      if (section.resolve) apply_dynamic(section);
    if (!problems_.empty()) throw ConfigError(std::move(problems_));
    note_defaults();
    return std::move(origins_);
  }

 private:
  void take_text(const std::string& toml, const std::string& name) {
    try {
      const Document document = read_toml(toml, name);
      problems_.insert(problems_.end(), document.problems.begin(), document.problems.end());
      take(document);
    } catch (const ConfigError& error) {
      problems_.push_back(error.what());
    }
  }

  void take(const Document& document) {
    std::set<std::string, std::less<>> unknown;
    for (const Heading& heading : document.headings) {
      if (catalog_.is_table(heading.name) || catalog_.dynamic_section_of(heading.name)) continue;
      bool reported = unknown.count(table_of(heading.name)) != 0;
      unknown.insert(heading.name);
      if (!reported) report_heading(heading);
    }
    std::set<std::string> targets;
    for (const Leaf& leaf : document.leaves) {
      if (unknown.count(table_of(leaf.name)) != 0) continue;
      Assignment assignment{leaf.name, to_text(leaf.place), leaf.value};
      std::string target = catalog_.find(leaf.name).name;
      if (!targets.insert(target).second)
        report(assignment, "the same setting has another name, which is given too");
      take(std::move(assignment));
    }
  }

  void take(Assignment assignment) { assignments_.push_back(std::move(assignment)); }

  void report_heading(const Heading& heading) {
    const FieldInfo* field = catalog_.described(heading.name);
    std::string what = field != nullptr ? str("is ", with_article(field->kind), ", not a table")
                                        : str("unknown table", catalog_.suggest_table(heading.name));
    problem_tables_.emplace(table_of(heading.name));
    problems_.push_back(str(to_text(heading.place), ": [", heading.name, "]: ", what));
  }

  void apply_static() {
    auto is_static = [&](const Assignment& given) { return !catalog_.dynamic_section_of(given.name); };
    apply_if(is_static, job_);
  }

  /// A dynamic table can't be judged if a table it depends on has a problem. A problem at the top ("") may
  /// affect any table.
  bool is_in_doubt(const Section& section) const {
    auto has_problem = [&](const std::string& table) { return problem_tables_.count(table) != 0; };
    return has_problem("") || std::any_of(section.depends_on.begin(), section.depends_on.end(), has_problem);
  }

  void apply_dynamic(const Section& section) {
    if (is_in_doubt(section)) return;
    DynamicTable& table = section.table_of(job_);
    try {
      table = section.resolve(job_, origins_);
    } catch (const ConfigError& error) {
      problems_.insert(problems_.end(), error.problems().begin(), error.problems().end());
      return;
    }
    catalog_.add_fields(section.name, table.fields);
    auto is_here = [&](const Assignment& given) {
      return catalog_.dynamic_section_of(given.name) == &section;
    };
    apply_if(is_here, table.settings.get());
  }

  /// Reports every unknown key. If a key has several values, the last one counts, and only that one is
  /// judged: a command line can correct a file.
  template <class Predicate>
  void apply_if(const Predicate& is_meant, void* settings) {
    std::vector<Assignment> meant;
    for (const Assignment& assignment : assignments_)
      if (is_meant(assignment)) meant.push_back(without_no(assignment));
    std::map<const FieldInfo*, size_t> last;
    for (size_t i = 0; i < meant.size(); ++i) last[catalog_.find(meant[i].name).field] = i;
    for (size_t i = 0; i < meant.size(); ++i) {
      Catalog::Entry entry = catalog_.find(meant[i].name);
      if (entry.field == nullptr) {
        report(meant[i], unknown_problem(meant[i].name));
      } else if (last[entry.field] == i) {
        apply(meant[i], entry, settings);
      }
    }
    check_refused_where(settings);
  }

  void apply(const Assignment& assignment, const Catalog::Entry& entry, void* settings) {
    const FieldInfo& field = *entry.field;
    std::optional<Raw> raw = raw_of(assignment, field);
    if (!raw) return report(assignment, str("needs a value (", name_of(field.kind), ")"));
    Converted converted = convert(field, *raw);
    if (!converted.problem.empty()) return report(assignment, converted.problem);
    field.set(settings, converted.value);
    origins_.set(entry.name, {assignment.place, shown_value(assignment)});
    // The refusal applies if `only_where` is on, which is known once all keys are read.
    bool is_refused = !field.only_where.empty() && converted.value != field.default_value;
    if (is_refused) refused_where_.emplace_back(assignment, &field);
  }

  void check_refused_where(const void* settings) {
    for (const auto& [assignment, field] : refused_where_) {
      const FieldInfo& where = catalog_.switch_of(assignment.name, *field);
      if (is_on(where, where.get(settings))) report(assignment, refusal(*field));
    }
    refused_where_.clear();
  }

  /// `--section.no_key` is `--section.key false` if there is such a bool.
  Assignment without_no(const Assignment& assignment) const {
    constexpr std::string_view kNo = "no_";
    const auto* word = std::get_if<Word>(&assignment.given);
    if (word == nullptr || word->has_value() || catalog_.described(assignment.name)) return assignment;
    std::string_view key = key_of(assignment.name);
    if (!key.starts_with(kNo)) return assignment;
    std::string positive = str(table_of(assignment.name), ".", key.substr(kNo.size()));
    const FieldInfo* field = catalog_.find(positive).field;
    if (field == nullptr || field->kind != Kind::Bool) return assignment;
    return {positive, "", Word("false")};
  }

  std::string unknown_problem(const std::string& name) const {
    if (catalog_.is_table(name)) return str("is a table of settings, not a value");
    return "unknown key" + catalog_.suggest_key(name);
  }

  void report(const Assignment& assignment, const std::string& what) {
    problem_tables_.emplace(table_of(assignment.name));
    problems_.push_back(to_text(assignment) + ": " + what);
  }

  void note_defaults() {
    for (const Section& section : schema_.sections()) {
      for (const FieldInfo& field : section.fields)
        origins_.set_default(section.name + "." + field.key, to_text(field.get(job_)));
      if (!section.resolve) continue;
      const DynamicTable& table = section.table_of(job_);
      for (const FieldInfo& field : table.fields)
        origins_.set_default(section.name + "." + field.key, to_text(field.get(table.settings.get())));
    }
  }

  const Schema& schema_;
  void* job_;
  Catalog catalog_;
  std::vector<Assignment> assignments_;
  std::vector<std::string> problems_;
  std::set<std::string, std::less<>> problem_tables_;
  std::vector<std::pair<Assignment, const FieldInfo*>> refused_where_;
  Origins origins_;
};

}  // namespace

std::string to_text(const Assignment& assignment) {
  std::string value = shown_value(assignment);
  std::string setting = value.empty() ? assignment.name : assignment.name + " = " + value;
  return assignment.place.empty() ? "--" + setting : assignment.place + ": " + setting;
}

namespace detail {

Origins load_into(const Schema& schema, const Sources& sources, void* scratch) {
  return Loader(schema, sources, scratch).run();
}

}  // namespace detail

}  // namespace titan::config
