#pragma once

// The names in a schema, and suggestions for unknown ones.

#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "titan/config/schema.h"

namespace titan::config {

class Catalog {
 public:
  explicit Catalog(const Schema& schema);

  /// Adds the fields of a dynamic section once they are known.
  void add_fields(const std::string& section, const std::vector<FieldInfo>& fields);

  struct Entry {
    std::string name;  ///< full
    const FieldInfo* field = nullptr;
  };
  /// The field with that full name, or the target if it is mapped. field == nullptr: none.
  Entry find(std::string_view name) const;
  /// Like find(), but doesn't follow mappings.
  const FieldInfo* described(std::string_view name) const;
  /// The key in FieldInfo::only_where of the field with that full name, from its own table or another.
  const FieldInfo& switch_of(std::string_view name, const FieldInfo& field) const;

  /// Whether it is a dynamic section or a field's name starts with "table.".
  bool is_table(std::string_view name) const;
  /// The dynamic section that `name` is or lies in, or nullptr.
  const Section* dynamic_section_of(std::string_view name) const;

  /// "; did you mean 'training.seq_len'?", or nothing.
  std::string suggest_key(std::string_view name) const;
  std::string suggest_table(std::string_view name) const;

 private:
  void add_table(std::string name);

  std::vector<std::string> names_;  // in the schema's order, for suggestions
  std::map<std::string, const FieldInfo*, std::less<>> fields_;
  std::set<std::string, std::less<>> tables_;
  std::vector<const Section*> dynamic_;
};

/// Whether `value` turns on the feature of a key that others name as FieldInfo::only_where.
bool is_on(const FieldInfo& field, const Value& value);

/// "training" of "training.seq_len", and "seq_len"; the table of a name without dot is "".
std::string_view table_of(std::string_view name);
std::string_view key_of(std::string_view name);

/// "; did you mean 'a' or 'b'?", or nothing when there are none.
std::string did_you_mean(const std::vector<std::string>& names);

}  // namespace titan::config
