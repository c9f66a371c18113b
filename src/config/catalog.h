#pragma once

// The names that a schema knows, and which of them somebody may have meant.

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

  /// Fields that became known late: those of a dynamic section.
  void add_fields(const std::string& section, const std::vector<FieldInfo>& fields);

  struct Entry {
    std::string name;  ///< full
    const FieldInfo* field = nullptr;
  };
  /// The field of a full name, behind a mapped one its target; field == nullptr when there is none.
  Entry find(std::string_view name) const;
  /// As find, without following a mapping.
  const FieldInfo* described(std::string_view name) const;
  /// What the field of that full name hangs on (FieldInfo::only_where, of its own table or another).
  const FieldInfo& switch_of(std::string_view name, const FieldInfo& field) const;

  /// Whether some field's name starts with "table.", or it is a dynamic section.
  bool is_table(std::string_view name) const;
  /// The dynamic section that `name` lies in, or is; nullptr for none.
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

/// A key that others hang on, whose feature a value of it may ask for; see FieldInfo::only_where.
bool is_on(const FieldInfo& field, const Value& value);

/// "training" of "training.seq_len", and "seq_len"; the table of a name without dot is "".
std::string_view table_of(std::string_view name);
std::string_view key_of(std::string_view name);

/// "; did you mean 'a' or 'b'?", or nothing when there are none.
std::string did_you_mean(const std::vector<std::string>& names);

}  // namespace titan::config
