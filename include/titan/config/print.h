#pragma once

// Settings and their descriptions as text: the resolved config, the command's help, the page docs/config.md.

#include <string>
#include <vector>

#include "titan/config/schema.h"
#include "titan/core/error.h"

namespace titan::config {

namespace detail {
std::string print_toml(const Schema& schema, const void* job);
std::string print_json(const Schema& schema, const void* job);
void check_job(const Schema& schema, const std::type_info& type);
}  // namespace detail

/// Every setting with its value, as TOML that load() reads back to equal values; unset optional fields are
/// comments. Keys that are refused or have no effect are left out: they hold nothing.
template <class Job>
std::string print_toml(const Schema& schema, const Job& job) {
  detail::check_job(schema, typeid(Job));
  return detail::print_toml(schema, &job);
}

/// The same as JSON; unset optional fields are null.
template <class Job>
std::string print_json(const Schema& schema, const Job& job) {
  detail::check_job(schema, typeid(Job));
  return detail::print_json(schema, &job);
}

/// One entry per key for a terminal, grouped by table: flag, type, meaning, allowed values, default; then the
/// refused keys.
std::string help_text(const Schema& schema, size_t columns = 110);

/// The same as Markdown, a section per table.
std::string markdown(const Schema& schema);

/// A key of another program, with its default as that program's documents write it in TOML, or "unset".
struct ForeignKey {
  std::string name;
  std::string default_text;
};

/// A Markdown table of what becomes of each key here: accepted, mapped, without effect, refused. A name that
/// the schema doesn't know is an Error.
std::string key_table(const Schema& schema, const std::vector<ForeignKey>& keys);

}  // namespace titan::config
