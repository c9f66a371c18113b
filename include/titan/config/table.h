#pragma once

// How a settings struct describes its fields, once. TOML and JSON reading, command-line overrides, --help,
// --print-config and docs/config.md all use this description. The struct lives in its owner's header, with
// `describe` beside it:
//
//   struct OptimizerSettings { std::string name = "AdamW"; double lr = 8e-4; };
//
//   void describe(config::Table<OptimizerSettings>& table) {
//     table.field("name", &OptimizerSettings::name, "optimizer", config::one_of({"Adam", "AdamW"}));
//     table.field("lr", &OptimizerSettings::lr, "peak learning rate", config::at_least(0));
//     table.refused("early_step_in_backward", false, "optimizer-in-backward makes clipping meaningless");
//   }
//
// A wrong description (a duplicate key, a default outside its own constraint) is an InternalError when the
// Schema is built.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

namespace titan::config {

using StringList = std::vector<std::string>;

/// A value in a config. std::monostate is an unset optional field.
using Value =
    std::variant<std::monostate, bool, int64_t, double, std::string, StringList, std::vector<StringList>>;

/// The type of a field, which determines its alternative of Value.
enum class Kind { Bool, Int, Float, String, StringList, StringLists };

/// "bool", "int", "float", "string", "list of strings", "list of lists of strings".
std::string_view name_of(Kind kind);

/// The kind of a value; String for std::monostate.
Kind kind_of(const Value& value);

/// As TOML (and, except for infinities, JSON) writes it: strings quoted and escaped, floats in the shortest
/// form that reads back to the same double and is still a float (`1.0`, `8e-4`). std::monostate is `unset`.
std::string to_text(const Value& value);

/// A string with quotes and with the escapes that TOML and JSON share.
std::string quoted(std::string_view text);

/// A condition on a value beyond its type. Unset optional fields aren't checked. The empty constraint accepts
/// everything.
struct Constraint {
  std::string allowed;  ///< for help and errors
  std::function<bool(const Value&)> accepts;
  std::vector<std::string> names;  ///< the allowed strings, if they can be listed, for "did you mean"
  std::string zero = {};           ///< a word that an int may have in place of 0: "auto"
};

/// One of these strings. In a list of strings, every entry has to be one.
Constraint one_of(std::vector<std::string> names);
Constraint at_least(double lowest);
/// The same, without infinity.
Constraint finite_at_least(double lowest);
Constraint above(double bound);
Constraint in_range(double lowest, double highest);
/// Excludes `bound`.
Constraint in_range_below(double lowest, double bound);
/// A positive integer, or "auto", which the struct gets as 0.
Constraint positive_or_auto();
/// A positive integer, or -1 for "the rest" / "all".
Constraint positive_or_minus_one();

/// Type-erased description of one key.
struct FieldInfo {
  enum class Role {
    Setting,        ///< a member of the struct
    Refused,        ///< known, but only default_value is accepted; `reason` says why
    WithoutEffect,  ///< accepted and ignored; `reason` says why
    Mapped,         ///< another name of the key `mapped_to` in the same table
  };

  std::string key;  ///< may hold dots, for a sub-table
  Kind kind = Kind::String;
  bool optional = false;
  std::string meaning;
  Constraint constraint;
  Value default_value;
  Role role = Role::Setting;
  std::string reason;
  std::string only_where;  ///< for a refused key: the refusal applies only while this key is on
  std::string mapped_to;
  std::function<Value(const void* settings)> get;
  std::function<void(void* settings, const Value&)> set;  ///< the value already has the right alternative
};

namespace detail {

template <class T>
struct Optional : std::false_type {
  using Inner = T;
};
template <class T>
struct Optional<std::optional<T>> : std::true_type {
  using Inner = T;
};

template <class T>
Value to_value(const T& member) {
  if constexpr (Optional<T>::value) {
    return member ? Value(*member) : Value();
  } else {
    return member;
  }
}

template <class T>
void assign(T& member, const Value& value) {
  if constexpr (Optional<T>::value) {
    if (std::holds_alternative<std::monostate>(value)) {
      member.reset();
      return;
    }
  }
  member = std::get<typename Optional<T>::Inner>(value);
}

/// The same field, accessed through a struct that contains the field's struct as `member`.
template <class Outer, class Inner>
FieldInfo rebased(FieldInfo field, Inner Outer::*member) {
  field.get = [get = std::move(field.get), member](const void* outer) {
    return get(&(static_cast<const Outer*>(outer)->*member));
  };
  field.set = [set = std::move(field.set), member](void* outer, const Value& value) {
    set(&(static_cast<Outer*>(outer)->*member), value);
  };
  return field;
}

/// A key without a member: reading gives its default, writing does nothing.
FieldInfo memberless(std::string key, Value default_value, FieldInfo::Role role, std::string reason);

}  // namespace detail

/// Collects the fields of one settings struct S (default-constructible: its member initializers are the
/// defaults). Member types: bool, int64_t, double, std::string, StringList, std::vector<StringList>, and
/// std::optional of these.
template <class S>
class Table {
 public:
  template <class T>
  void field(std::string key, T S::*member, std::string meaning, Constraint constraint = {}) {
    FieldInfo info;
    info.key = std::move(key);
    info.kind = kind_of(Value(typename detail::Optional<T>::Inner()));
    info.optional = detail::Optional<T>::value;
    info.meaning = std::move(meaning);
    info.constraint = std::move(constraint);
    info.default_value = detail::to_value(S{}.*member);
    info.get = [member](const void* settings) {
      return detail::to_value(static_cast<const S*>(settings)->*member);
    };
    info.set = [member](void* settings, const Value& value) {
      detail::assign(static_cast<S*>(settings)->*member, value);
    };
    add(std::move(info));
  }

  /// A key of TorchTitan whose feature doesn't exist here: only `only_value` is accepted; `{}` means unset,
  /// so every value is refused. `only_where` names a key in this table ("enable") or another
  /// ("fault_tolerance.enable"). While that key is off (false, or for other kinds the default), any value
  /// that `constraint` accepts is allowed.
  void refused(std::string key, Value only_value, std::string reason, std::string only_where = {},
               Constraint constraint = {}) {
    FieldInfo& info = add(detail::memberless(std::move(key), std::move(only_value), FieldInfo::Role::Refused,
                                             std::move(reason)));
    info.only_where = std::move(only_where);
    info.constraint = std::move(constraint);
  }

  /// A key of TorchTitan about Python internals, which have no counterpart here. Use refused() for a feature
  /// that doesn't exist.
  void without_effect(std::string key, Value default_value, std::string reason, Constraint constraint = {}) {
    add(detail::memberless(std::move(key), std::move(default_value), FieldInfo::Role::WithoutEffect,
                           std::move(reason)))
        .constraint = std::move(constraint);
  }

  /// An older name of `to_key`.
  void mapped(std::string key, std::string to_key, std::string reason) {
    add(detail::memberless(std::move(key), {}, FieldInfo::Role::Mapped, std::move(reason))).mapped_to =
        std::move(to_key);
  }

  /// A sub-table (`[model.args]`, `[training.dataloader]`): fields get the keys "name.key".
  template <class Sub>
  void table(std::string name, Sub S::*member) {
    include(name + ".", member);
  }

  /// The fields of a struct within S, each with `prefix` before its key.
  template <class Sub>
  void include(std::string prefix, Sub S::*member) {
    Table<Sub> sub;
    describe(sub);
    const S defaults{};
    for (const FieldInfo& inner : sub.fields()) {
      FieldInfo field = detail::rebased(inner, member);
      field.default_value = field.get(&defaults);
      field.key = prefix + inner.key;
      if (!field.mapped_to.empty()) field.mapped_to = prefix + inner.mapped_to;
      if (!field.only_where.empty()) field.only_where = prefix + inner.only_where;
      add(std::move(field));
    }
  }

  const std::vector<FieldInfo>& fields() const { return fields_; }

 private:
  FieldInfo& add(FieldInfo field) { return fields_.emplace_back(std::move(field)); }

  std::vector<FieldInfo> fields_;
};

/// Settings whose fields depend on other settings: the model decides what `[model.args]` contains. Copies
/// share `settings`.
struct DynamicTable {
  std::vector<FieldInfo> fields;   ///< get and set take settings.get()
  std::shared_ptr<void> settings;  ///< starts with the defaults; nullptr: no such table
};

}  // namespace titan::config
