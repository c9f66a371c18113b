#pragma once

// Templates of table.h.

#include <type_traits>
#include <utility>

#include "titan/config/table.h"

namespace titan::config {
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
constexpr Kind kind_for() {
  if constexpr (std::is_same_v<T, bool>) {
    return Kind::Bool;
  } else if constexpr (std::is_same_v<T, int64_t>) {
    return Kind::Int;
  } else if constexpr (std::is_same_v<T, double>) {
    return Kind::Float;
  } else if constexpr (std::is_same_v<T, std::string>) {
    return Kind::String;
  } else if constexpr (std::is_same_v<T, StringList>) {
    return Kind::StringList;
  } else {
    static_assert(std::is_same_v<T, std::vector<StringList>>,
                  "settings are bool, int64_t, double, std::string or lists");
    return Kind::StringLists;
  }
}

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

/// The same field, reached from a struct that holds its struct as `member`.
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

/// A key that is no member: it reads as its default, and writing changes nothing.
FieldInfo memberless(std::string key, Value default_value, FieldInfo::Role role, std::string reason);

}  // namespace detail

template <class S>
template <class T>
void Table<S>::field(std::string key, T S::*member, std::string meaning, Constraint constraint) {
  FieldInfo info;
  info.key = std::move(key);
  info.kind = detail::kind_for<typename detail::Optional<T>::Inner>();
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
  fields_.push_back(std::move(info));
}

template <class S>
void Table<S>::refused(std::string key, Value only_value, std::string reason, std::string only_where,
                       Constraint constraint) {
  fields_.push_back(
      detail::memberless(std::move(key), std::move(only_value), FieldInfo::Role::Refused, std::move(reason)));
  fields_.back().only_where = std::move(only_where);
  fields_.back().constraint = std::move(constraint);
}

template <class S>
void Table<S>::without_effect(std::string key, Value default_value, std::string reason,
                              Constraint constraint) {
  fields_.push_back(detail::memberless(std::move(key), std::move(default_value),
                                       FieldInfo::Role::WithoutEffect, std::move(reason)));
  fields_.back().constraint = std::move(constraint);
}

template <class S>
void Table<S>::mapped(std::string key, std::string to_key, std::string reason) {
  fields_.push_back(detail::memberless(std::move(key), {}, FieldInfo::Role::Mapped, std::move(reason)));
  fields_.back().mapped_to = std::move(to_key);
}

template <class S>
template <class Sub>
void Table<S>::table(std::string name, Sub S::*member) {
  Table<Sub> sub;
  describe(sub);
  const S defaults{};
  for (const FieldInfo& inner : sub.fields()) {
    FieldInfo field = detail::rebased(inner, member);
    field.default_value = field.get(&defaults);
    field.key = name + "." + inner.key;
    if (!field.mapped_to.empty()) field.mapped_to = name + "." + inner.mapped_to;
    if (!field.only_where.empty()) field.only_where = name + "." + inner.only_where;
    fields_.push_back(std::move(field));
  }
}

}  // namespace titan::config
