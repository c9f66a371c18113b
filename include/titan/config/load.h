#pragma once

// Files and command line to settings. Precedence: command line, then the file, then what it includes, then
// defaults.
//
// Files are TOML (*.toml) or JSON (*.json), the same tree. `include = ["base.toml"]` at the top reads other
// files first, relative to the including one; of two that set a key, the later wins, and lists are replaced
// whole. In JSON null unsets an optional field. Command line: `--section.key value` or `--section.key=value`,
// '-' and '_' alike; booleans `--s.k`, `--s.k true|false`, `--s.no_k`; lists `a,b`, lists of lists `a,b;c`;
// "none" unsets an optional field. An int is a float too, a float without fraction an int. The string "inf"
// is a float in JSON, which has no other way to say it.
//
// Every problem is reported in one ConfigError, a line each; a value that a later one replaces isn't judged:
//   configs/a.toml:3:1: training.steps = 0: must be at least 1
//   configs/a.toml:9:1: model.seq_len = 128: unknown key; did you mean 'training.seq_len'?
//   --optimizer.name = Adamw: must be one of "Adam", "AdamW"; did you mean 'AdamW'?

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "titan/config/schema.h"
#include "titan/core/error.h"

namespace titan::config {

struct Sources {
  std::filesystem::path file;          ///< empty: defaults and overrides only
  std::vector<std::string> overrides;  ///< command-line words, from the first `--section.key` on
  /// TOML that is taken in place of the file's, whose name is for messages then; it includes nothing.
  std::string toml = {};
};

/// Fills `job` (default-constructed or not: unmentioned fields keep their value) or throws ConfigError and
/// leaves it alone.
template <class Job>
Origins load(const Schema& schema, const Sources& sources, Job& job);

/// The value that `--name value` or `--name=value` gives among `words`, the last one if several; before
/// anything is loaded: how the command line learns job.config_file.
std::optional<std::string> override_value(const std::vector<std::string>& words, std::string_view name);

namespace detail {
/// As load(), into a job that is thrown away when this throws.
Origins load_into(const Schema& schema, const Sources& sources, void* scratch);
}  // namespace detail

template <class Job>
Origins load(const Schema& schema, const Sources& sources, Job& job) {
  TITAN_CHECK(schema.job_type() == typeid(Job), "this schema describes another struct than the one to fill");
  Job scratch = job;
  Origins origins = detail::load_into(schema, sources, &scratch);
  job = std::move(scratch);
  return origins;
}

// Settings and their descriptions as text: the resolved config, the command's help, the page docs/config.md.

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
