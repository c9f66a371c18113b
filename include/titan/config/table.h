#pragma once

// How a settings struct describes itself, once. From this description come TOML and JSON reading,
// command-line overrides, --help, --print-config and docs/config.md. The struct lives in its owner's header:
//
//   struct OptimizerSettings { std::string name = "AdamW"; double lr = 8e-4; };
//   void describe(config::Table<OptimizerSettings>& table);   // declared beside it, found by
//   argument-dependent lookup
//
//   void describe(config::Table<OptimizerSettings>& table) {
//     table.field("name", &OptimizerSettings::name, "optimizer", config::one_of({"Adam", "AdamW"}));
//     table.field("lr", &OptimizerSettings::lr, "peak learning rate", config::at_least(0));
//     table.refused("early_step_in_backward", false, "optimizer-in-backward makes clipping meaningless");
//   }
//
// Wrong descriptions (a key twice, a default outside its own constraint) are InternalErrors when the Schema
// is built.

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "titan/config/value.h"

namespace titan::config {

/// What a value must satisfy beyond its type. `allowed` is shown in help and in errors; `accepts` decides.
/// An unset optional isn't asked. The empty constraint accepts everything.
struct Constraint {
  std::string allowed;
  std::function<bool(const Value&)> accepts;
  std::vector<std::string> names;  ///< the allowed strings where they can be listed: for "did you mean"
};

/// One of these strings; in a list of strings, each of its entries.
Constraint one_of(std::vector<std::string> names);
Constraint at_least(double lowest);
/// The same, and no infinity.
Constraint finite_at_least(double lowest);
Constraint above(double bound);
Constraint in_range(double lowest, double highest);
/// Without `bound` itself.
Constraint in_range_below(double lowest, double bound);
/// A positive integer, or -1 for "the rest" / "all".
Constraint positive_or_minus_one();

/// Type-erased description of one key.
struct FieldInfo {
  /// What the key is to this program.
  enum class Role {
    Setting,        ///< a member of the struct
    Refused,        ///< known, but only default_value is accepted; `reason` says why
    WithoutEffect,  ///< accepted with any value that means something, and read by nothing; `reason` says
                    ///< why that is honest
    Mapped,         ///< another name of the key `mapped_to`, which lies in the same table
  };

  std::string key;  ///< may hold dots, for a sub-table
  Kind kind = Kind::String;
  bool optional = false;
  std::string meaning;
  Constraint constraint;
  Value default_value;
  Role role = Role::Setting;
  std::string reason;
  std::string only_where;  ///< of a refused key: the key that has to be on for it to matter
  std::string mapped_to;
  std::function<Value(const void* settings)> get;
  std::function<void(void* settings, const Value&)> set;  ///< the value has the right alternative already
};

/// Collects the fields of one settings struct S (default-constructible: its member initializers are the
/// defaults). Member types: bool, int64_t, double, std::string, StringList, std::vector<StringList>, and
/// std::optional of these.
template <class S>
class Table {
 public:
  template <class T>
  void field(std::string key, T S::*member, std::string meaning, Constraint constraint = {});

  /// A key of TorchTitan whose feature doesn't exist (yet): read, but refused at any value other than
  /// `only_value`.
  /// `{}` as only_value is "unset": any value is refused. `only_where` names the key without which nothing
  /// would read this one, in this table ("enable") or another ("fault_tolerance.enable"): while that is off
  /// (a bool: false, another kind: its default), any value that `constraint` takes is accepted.
  void refused(std::string key, Value only_value, std::string reason, std::string only_where = {},
               Constraint constraint = {});

  /// A key of TorchTitan about Python's workings, which have no counterpart here. A key of a feature that
  /// doesn't exist is refused() instead.
  void without_effect(std::string key, Value default_value, std::string reason, Constraint constraint = {});

  /// An older name of `to_key`.
  void mapped(std::string key, std::string to_key, std::string reason);

  /// A sub-table (`[model.args]`, `[training.dataloader]`): fields get the keys "name.key".
  template <class Sub>
  void table(std::string name, Sub S::*member);

  const std::vector<FieldInfo>& fields() const { return fields_; }

 private:
  std::vector<FieldInfo> fields_;
};

}  // namespace titan::config

#include "titan/config/table_impl.h"
