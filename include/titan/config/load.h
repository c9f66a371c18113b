#pragma once

// Files and command line to settings, and settings back to text.
//
//   JobConfig job;
//   Origins origins = load(schema, {.file = "configs/a.toml", .overrides = words}, job);
//   std::string resolved = print_toml(schema, job);
//
// Precedence: the command line, then the file, then its includes, then defaults. Files are TOML (*.toml) or
// JSON (*.json) with the same tree. `include = ["base.toml"]` at the top reads other files first, relative to
// the including file. If two files set a key, the later one wins; lists are replaced as a whole. In JSON,
// null unsets an optional field, and the string "inf" is a float.
//
// On the command line: `--section.key value` or `--section.key=value`, with '-' or '_'; booleans `--s.k`,
// `--s.k true|false` or `--s.no_k`; lists `a,b`; lists of lists `a,b;c`; `none` unsets an optional field. An
// int can be given for a float, and a float without fraction for an int.
//
// One ConfigError reports every problem, one per line. A value that a later one replaces isn't judged:
//
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
  /// TOML to read instead of the file, whose name then only appears in messages. Includes aren't read.
  std::string toml = {};
};

/// Fills `job`; fields that nothing sets keep their value. Leaves it unchanged if it throws ConfigError.
template <class Job>
Origins load(const Schema& schema, const Sources& sources, Job& job);

/// The last value of `--name value` or `--name=value` in `words`. The command line finds job.config_file this
/// way, before anything is loaded.
std::optional<std::string> override_value(const std::vector<std::string>& words, std::string_view name);

namespace detail {
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

// ---- settings and their descriptions as text

namespace detail {
std::string print_toml(const Schema& schema, const void* job);
std::string print_json(const Schema& schema, const void* job);
void check_job(const Schema& schema, const std::type_info& type);
}  // namespace detail

/// Every setting with its value, as TOML that load() reads back to equal values. Unset optional fields become
/// comments; keys that are refused or have no effect are left out.
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

/// One entry per key for a terminal, grouped by table: flag, type, meaning, allowed values, default.
std::string help_text(const Schema& schema, size_t columns = 110);

/// The same as Markdown, with a section per table.
std::string markdown(const Schema& schema);

/// A key of another program and its default there, as TOML or "unset".
struct ForeignKey {
  std::string name;
  std::string default_text;
};

/// A Markdown table of what happens to each key here: accepted, mapped, without effect, or refused. Throws
/// Error for a name that isn't in the schema.
std::string key_table(const Schema& schema, const std::vector<ForeignKey>& keys);

}  // namespace titan::config
