#include <algorithm>
#include <charconv>
#include <cmath>
#include <functional>
#include <limits>
#include <set>

#include "config/document.h"
#include "core/json.h"
#include "core/utf8.h"

namespace titan::config {
namespace {

// ---- names

/// The table of "training.seq_len" is "training", its key is "seq_len". Without a dot, the table is "".
std::string_view table_of(std::string_view name) {
  size_t dot = name.rfind('.');
  return dot == std::string_view::npos ? std::string_view() : name.substr(0, dot);
}
std::string_view key_of(std::string_view name) { return name.substr(name.rfind('.') + 1); }

/// "; did you mean 'a' or 'b'?", or "" without names.
std::string suggestion(const std::vector<std::string>& names) {
  if (names.empty()) return {};
  std::string listed;
  for (const auto& name : names) listed += str(listed.empty() ? "" : " or ", "'", name, "'");
  return "; did you mean " + listed + "?";
}

/// The names in a schema, and suggestions for unknown ones.
class Catalog {
 public:
  explicit Catalog(const Schema& schema) {
    for (const Section& section : schema.sections()) {
      add_fields(section.name, section.fields);
      if (!section.resolve) continue;
      dynamic_.push_back(&section);
      add_table(section.name);
    }
    for (const auto& [name, field] : fields_)
      if (!field->only_where.empty()) switch_of(name, *field);
  }

  /// Adds the fields of a dynamic section once they are known.
  void add_fields(const std::string& section, const std::vector<FieldInfo>& fields) {
    for (const FieldInfo& field : fields) {
      names_.push_back(section + "." + field.key);
      fields_[names_.back()] = &field;
      add_table(table_of(names_.back()));
    }
  }

  struct Entry {
    std::string name;  ///< full
    const FieldInfo* field = nullptr;
  };
  /// The field with that full name, or the target if it is mapped. field == nullptr: none.
  Entry find(std::string_view name) const {
    const FieldInfo* field = described(name);
    if (field == nullptr || field->role != FieldInfo::Role::Mapped) return {std::string(name), field};
    return find(str(section_of(name, *field), field->mapped_to));
  }

  /// Like find(), but doesn't follow mappings.
  const FieldInfo* described(std::string_view name) const {
    auto found = fields_.find(name);
    return found == fields_.end() ? nullptr : found->second;
  }

  /// The key in FieldInfo::only_where of the field with that full name, from its own table or another.
  const FieldInfo& switch_of(std::string_view name, const FieldInfo& field) const {
    const FieldInfo* found = described(str(section_of(name, field), field.only_where));
    if (found == nullptr) found = described(field.only_where);
    TITAN_INTERNAL_ASSERT(found != nullptr, name, " refers to ", field.only_where, ", which doesn't exist");
    return *found;
  }

  /// Whether it is a dynamic section or a field's name starts with "table.".
  bool is_table(std::string_view name) const { return tables_.find(name) != tables_.end(); }

  /// The dynamic section that `name` is or lies in, or nullptr.
  const Section* dynamic_section_of(std::string_view name) const {
    for (const Section* section : dynamic_)
      if (name == section->name || name.starts_with(section->name + ".")) return section;
    return nullptr;
  }

  /// "; did you mean 'training.seq_len'?", or nothing. Tries, in this order: a typo in the key, the right key
  /// in another table, a typo in both.
  std::string suggest_key(std::string_view name) const {
    constexpr size_t kMostTables = 3;
    std::string key(key_of(name));
    std::vector<std::string> siblings, elsewhere, similar;
    for (const std::string& known : names_) {
      if (table_of(known) == table_of(name)) siblings.emplace_back(key_of(known));
      if (key_of(known) == key && elsewhere.size() < kMostTables) elsewhere.push_back(known);
      if (!nearest_names(key, {std::string(key_of(known))}).empty()) similar.push_back(known);
    }
    auto slips = nearest_names(key, siblings, 1);
    if (!slips.empty()) return suggestion({str(table_of(name), ".", slips.front())});
    if (!elsewhere.empty()) return suggestion(elsewhere);
    const std::string typo = did_you_mean(name, similar);
    return typo.empty() && !similar.empty() ? suggestion({similar.front()}) : typo;
  }

  std::string suggest_table(std::string_view name) const {
    auto near = nearest_names(name, {tables_.begin(), tables_.end()}, 1);
    return near.empty() ? "" : str("; did you mean [", near.front(), "]?");
  }

 private:
  /// "training." of the field's full name. A key may hold dots.
  static std::string_view section_of(std::string_view name, const FieldInfo& field) {
    return name.substr(0, name.size() - field.key.size());
  }

  void add_table(std::string_view name) {
    for (; !name.empty(); name = table_of(name)) tables_.emplace(name);
  }

  std::vector<std::string> names_;  // in the schema's order, for suggestions
  std::map<std::string, const FieldInfo*, std::less<>> fields_;
  std::set<std::string, std::less<>> tables_;
  std::vector<const Section*> dynamic_;
};

// ---- conversion of a value to a field's type

constexpr double kExactInts = 9007199254740992.0;  // 2^53: larger floats don't identify an int

template <class T>
std::optional<T> as(const Raw& raw) {
  const auto* value = std::get_if<T>(&raw.value);
  return value == nullptr ? std::nullopt : std::optional(*value);
}

std::optional<Value> as_int(const Raw& raw) {
  const auto real = as<double>(raw);
  if (real && std::trunc(*real) == *real && std::abs(*real) <= kExactInts) return static_cast<int64_t>(*real);
  return as<int64_t>(raw);
}

std::optional<Value> as_float(const Raw& raw) {
  if (const auto integer = as<int64_t>(raw)) return static_cast<double>(*integer);
  if (const auto real = as<double>(raw); real && !std::isnan(*real)) return *real;
  const auto text = as<std::string>(raw);  // JSON has no literal for infinity
  if (text == "inf") return std::numeric_limits<double>::infinity();
  if (text == "-inf") return -std::numeric_limits<double>::infinity();
  return std::nullopt;
}

/// The items of a list, if it is one and `to_item` accepts each.
template <class Item, class ToItem>
std::optional<std::vector<Item>> as_list(const Raw& raw, const ToItem& to_item) {
  const auto* items = std::get_if<Raw::List>(&raw.value);
  if (items == nullptr) return std::nullopt;
  std::vector<Item> list;
  for (const Raw& raw_item : *items) {
    std::optional<Item> item = to_item(raw_item);
    if (!item) return std::nullopt;
    list.push_back(std::move(*item));
  }
  return list;
}

std::optional<StringList> as_strings(const Raw& raw) { return as_list<std::string>(raw, as<std::string>); }

std::optional<Value> as_kind(Kind kind, const Raw& raw) {
  switch (kind) {
    case Kind::Bool:
      return as<bool>(raw);
    case Kind::Int:
      return as_int(raw);
    case Kind::Float:
      return as_float(raw);
    case Kind::String:
      return as<std::string>(raw);
    case Kind::StringList:
      return as_strings(raw);
    case Kind::StringLists:
      return as_list<StringList>(raw, as_strings);
  }
  return std::nullopt;
}

bool is_null(const Raw& raw) { return std::holds_alternative<Raw::Null>(raw.value); }

/// "an int", "a list of strings".
std::string with_article(Kind kind) { return str(kind == Kind::Int ? "an " : "a ", name_of(kind)); }

std::string type_problem(const FieldInfo& field, const Raw& raw) {
  bool wants_list = field.kind == Kind::StringList || field.kind == Kind::StringLists;
  if (wants_list && std::holds_alternative<Raw::List>(raw.value))
    return "must be " + with_article(field.kind);
  return str("must be ", with_article(field.kind), ", not ", type_of(raw));
}

std::string constraint_problem(const FieldInfo& field, const Value& value) {
  std::string problem = "must be " + field.constraint.allowed;
  const auto* text = std::get_if<std::string>(&value);
  return text == nullptr ? problem : problem + did_you_mean(*text, field.constraint.names);
}

/// "not supported: <reason>; only false is accepted".
std::string refusal(const FieldInfo& field) {
  bool unset = std::holds_alternative<std::monostate>(field.default_value);
  return str(unsupported_text(field),
             unset ? "; it must stay unset" : str("; only ", to_text(field.default_value), " is accepted"));
}

struct Converted {
  Value value;
  std::string problem = {};  ///< empty if `value` is valid
};

/// Checks type, constraint and refusal. The caller checks refusals that depend on another key.
Converted convert(const FieldInfo& field, const Raw& raw) {
  if (field.role == FieldInfo::Role::Refused && field.only_where.empty()) {
    std::optional<Value> value = is_null(raw) ? Value() : as_kind(field.kind, raw);
    return value == field.default_value ? Converted{*value} : Converted{{}, refusal(field)};
  }
  bool any_kind = field.role != FieldInfo::Role::Setting && field.optional;  // an unset default has no type
  if (any_kind && is_null(raw)) return {};
  if (any_kind && !field.constraint.accepts) return {Value(to_text(raw))};
  if (is_null(raw))
    return field.optional ? Converted{} : Converted{{}, "must be " + with_article(field.kind) + ", not null"};
  auto value = as_kind(field.kind, raw);
  const std::string& zero = field.constraint.zero;
  if (!value && !zero.empty() && as<std::string>(raw) == zero) return {Value(int64_t{0})};
  if (!value) return {{}, type_problem(field, raw)};
  if (field.constraint.accepts && !field.constraint.accepts(*value))
    return {{}, constraint_problem(field, *value)};
  return {std::move(*value)};
}

template <class Number>
std::optional<Number> parsed(std::string_view word) {
  Number number{};
  auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), number);
  if (error != std::errc() || end != word.data() + word.size()) return std::nullopt;
  return number;
}

Raw raw_number(std::string_view word) {
  if (auto integer = parsed<int64_t>(word)) return {*integer};
  if (auto real = parsed<double>(word)) return {*real};
  return {std::string(word)};
}

template <class ToItem>
Raw raw_list(std::string_view word, char separator, const ToItem& item_of) {
  Raw::List items;
  while (!word.empty()) {
    size_t end = std::min(word.find(separator), word.size());
    items.push_back(item_of(word.substr(0, end)));
    word.remove_prefix(std::min(end + 1, word.size()));
  }
  return {std::move(items)};
}

Raw raw_string(std::string_view word) { return {std::string(word)}; }

Raw raw_strings(std::string_view word) { return raw_list(word, ',', raw_string); }

/// A JSON list of strings or lists, as in TOML; nullopt if `word` is something else.
std::optional<Raw> raw_json_list(std::string_view word) {
  const std::function<Raw(const nlohmann::json&)> raw_of_json = [&](const nlohmann::json& value) {
    if (!value.is_array()) return raw_string(value.is_string() ? value.get<std::string>() : value.dump());
    Raw::List items;
    for (const nlohmann::json& item : value) items.push_back(raw_of_json(item));
    return Raw{std::move(items)};
  };
  if (!word.starts_with('[')) return std::nullopt;
  const auto tree = parse_json(word);
  return tree.is_array() ? std::optional(raw_of_json(tree)) : std::nullopt;
}

/// Parses a command-line word for the field's kind: "none" unsets, "a,b" is a list, "a,b;c" a list of lists; lists may
/// also be written as in TOML: '["a", "b"]'. A word that doesn't fit stays a string, which convert() refuses.
Raw raw_of_word(const FieldInfo& field, std::string_view word) {
  if (field.optional && (word == "none" || word == "None")) return {Raw::Null{}};
  switch (field.kind) {
    case Kind::Bool:
      return word == "true" || word == "false" ? Raw{word == "true"} : raw_string(word);
    case Kind::Int:
    case Kind::Float:
      return raw_number(word);
    case Kind::String:
      return raw_string(word);
    case Kind::StringList:
      return raw_json_list(word).value_or(raw_strings(word));
    case Kind::StringLists:
      return raw_json_list(word).value_or(raw_list(word, ';', raw_strings));
  }
  return raw_string(word);
}

// ---- assignments and the loader

/// Long values are cut between UTF-8 characters, so that a message is one line.
std::string shortened(const std::string& text) {
  constexpr size_t kLongest = 100;
  if (text.size() <= kLongest) return text;
  size_t end = kLongest;
  while (end > 0 && !starts_character(text[end])) --end;
  return text.substr(0, end) + "...";
}

std::string shown_value(const Assignment& assignment) {
  if (const auto* raw = std::get_if<Raw>(&assignment.given)) return shortened(to_text(*raw));
  const Word& word = std::get<Word>(assignment.given);
  return word ? shortened(*word) : "";
}

/// The beginning of each message about it: "configs/a.toml:3:1: training.steps = 0", "--training.steps = 0".
std::string shown(const Assignment& assignment) {
  std::string value = shown_value(assignment);
  std::string setting = shortened(assignment.name) + (value.empty() ? "" : " = " + value);
  return assignment.place.empty() ? "--" + setting : assignment.place + ": " + setting;
}

/// nullopt for a bare `--name` whose field isn't a bool.
std::optional<Raw> raw_of(const Assignment& assignment, const FieldInfo& field) {
  if (const auto* raw = std::get_if<Raw>(&assignment.given)) return *raw;
  if (const Word& word = std::get<Word>(assignment.given)) return raw_of_word(field, *word);
  return field.kind == Kind::Bool ? std::optional<Raw>(Raw{true}) : std::nullopt;
}

/// Turns assignments into settings and problems. Some wait until a dynamic table is known.
class Loader {
 public:
  Loader(const Schema& schema, const Sources& sources, void* job)
      : schema_(schema), job_(job), catalog_(schema) {
    if (!sources.toml.empty())
      take_text(sources.toml, sources.file.string());
    else if (!sources.file.empty())
      for (const Document& document : read_documents(sources.file, problems_)) take(document);
    for (Assignment& assignment : read_words(sources.overrides, problems_))
      assignments_.push_back(std::move(assignment));
  }

  Origins run() {
    apply_in(nullptr, job_);
    for (const Section& section : schema_.sections())
      if (section.resolve) apply_dynamic(section);
    if (!problems_.empty()) throw ConfigError(std::move(problems_));
    schema_.finish(job_, origins_);
    for_each_field(schema_, job_, [&](const std::string& name, const FieldInfo& field, const void* settings) {
      origins_.set_default(name, to_text(field.get(settings)));
    });
    return std::move(origins_);
  }

 private:
  void take_text(const std::string& toml, const std::string& name) {
    try {
      take(read_toml(toml, name));
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
        report(assignment, "this setting is also given under its other name");
      assignments_.push_back(std::move(assignment));
    }
  }

  void report_heading(const Heading& heading) {
    const FieldInfo* field = catalog_.described(heading.name);
    std::string what = field != nullptr ? str("is ", with_article(field->kind), ", not a table")
                                        : str("unknown table", catalog_.suggest_table(heading.name));
    problem_tables_.emplace(table_of(heading.name));
    problems_.push_back(str(to_text(heading.place), ": [", shortened(heading.name), "]: ", what));
  }

  /// A dynamic table can't be checked if a table it depends on has a problem. A problem at the top ("") may
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
    apply_in(&section, table.settings.get());
  }

  /// Applies the assignments of one dynamic section, or of all other tables (nullptr). Reports every unknown
  /// key. If a key has several values, the last one counts and only that one is checked: a command line can
  /// correct a file.
  void apply_in(const Section* dynamic, void* settings) {
    std::vector<Assignment> meant;
    for (const Assignment& assignment : assignments_)
      if (catalog_.dynamic_section_of(assignment.name) == dynamic) meant.push_back(without_no(assignment));
    std::map<const FieldInfo*, size_t> last;
    for (size_t i = 0; i < meant.size(); ++i) last[catalog_.find(meant[i].name).field] = i;
    for (size_t i = 0; i < meant.size(); ++i) {
      Catalog::Entry entry = catalog_.find(meant[i].name);
      if (entry.field == nullptr) {
        constexpr size_t kMostSuggestions = 100;  // each compares all keys
        const bool suggests = problems_.size() < kMostSuggestions;
        report(meant[i], catalog_.is_table(meant[i].name)
                             ? "is a table of settings, not a value"
                             : "unknown key" + (suggests ? catalog_.suggest_key(meant[i].name) : ""));
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
      const Value value = where.get(settings);
      const bool is_on = where.kind == Kind::Bool ? value == Value(true) : value != where.default_value;
      if (is_on) report(assignment, refusal(*field));
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

  void report(const Assignment& assignment, const std::string& what) {
    problem_tables_.emplace(table_of(assignment.name));
    problems_.push_back(shown(assignment) + ": " + what);
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

namespace detail {

Origins load_into(const Schema& schema, const Sources& sources, void* scratch) {
  return Loader(schema, sources, scratch).run();
}

}  // namespace detail

}  // namespace titan::config
