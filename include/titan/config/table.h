#pragma once

// How a settings struct describes itself, once. From this description come TOML and JSON reading, command-line
// overrides, --help, --print-config and docs/config.md. The struct lives in its owner's header:
//
//   struct OptimizerSettings { std::string name = "AdamW"; double lr = 8e-4; };
//   void describe(config::Table<OptimizerSettings>& table);          // declared beside it, found by argument-dependent lookup
//
//   void describe(config::Table<OptimizerSettings>& table) {
//     table.field("name", &OptimizerSettings::name, "optimizer", config::one_of({"Adam", "AdamW"}));
//     table.field("lr", &OptimizerSettings::lr, "peak learning rate", config::at_least(0));
//     table.refused("early_step_in_backward", false, "optimizer-in-backward makes clipping meaningless");
//   }

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace titan::config {

/// Every value that a config file can hold. An optional field that is unset is std::monostate.
using StringList = std::vector<std::string>;
using Value = std::variant<std::monostate, bool, int64_t, double, std::string, StringList, std::vector<StringList>>;

/// What a value must satisfy beyond its type. `allowed` is shown in help and in errors; `accepts` decides.
struct Constraint {
  std::string allowed;
  std::function<bool(const Value&)> accepts;
};

Constraint one_of(std::vector<std::string> names);
Constraint at_least(double lowest);
Constraint in_range(double lowest, double highest);
/// A positive integer, or -1 for "the rest" / "all".
Constraint positive_or_minus_one();

/// Type-erased description of one key. `kind` is "bool", "int", "float", "string", "list of strings", "list of lists of strings".
struct FieldInfo {
  std::string key;
  std::string kind;
  bool optional = false;
  std::string meaning;
  Constraint constraint;
  Value default_value;
  std::string refusal;  ///< not empty: only default_value is accepted; says why
  std::function<Value(const void* settings)> get;
  std::function<void(void* settings, const Value&)> set;  ///< the value has the right alternative already
};

/// Collects the fields of one settings struct S (default-constructible: its member initializers are the defaults).
/// Member types: bool, int64_t, double, std::string, StringList, std::vector<StringList>, std::optional of the first four.
template <class S>
class Table {
 public:
  template <class T>
  void field(std::string key, T S::*member, std::string meaning, Constraint constraint = {});

  /// A key of TorchTitan whose feature doesn't exist (yet): read, but refused at any value other than `only_value`.
  void refused(std::string key, Value only_value, std::string reason);

  /// A sub-table (`[model.args]`, `[training.dataloader]`): fields get the keys "name.key".
  template <class Sub>
  void table(std::string name, Sub S::*member);

  const std::vector<FieldInfo>& fields() const { return fields_; }

 private:
  std::vector<FieldInfo> fields_;
};

}  // namespace titan::config

#include "titan/config/table_impl.h"
