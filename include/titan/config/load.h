#pragma once

// Files and command line to settings, and settings back to text.
//
//   struct JobConfig { TrainingSettings training; OptimizerSettings optimizer; DynamicTable model_args; };
//   auto schema = Schema::of<JobConfig>();
//   schema.add("training", &JobConfig::training, "what a step is made of");
//   JobConfig job;
//   Origins origins = load(schema, {.file = "configs/a.toml", .overrides = words}, job);
//   std::string resolved = print_toml(schema, job);
//
// A schema has all tables of a program, in order, over one aggregate struct. A key's full name is
// "section.key"; sections may hold dots (`quantize.linear.float8`).
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
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "titan/config/table.h"
#include "titan/core/error.h"

namespace titan::config {

/// Where each value came from, for the messages of checks across fields. Empty for a job made in code.
class Origins {
 public:
  /// "configs/a.toml:3:1", "command line" or "default".
  std::string origin_of(std::string_view name) const;

  /// "configs/a.toml:3:1: training.seq_len = 100: <what>", "--training.seq_len = 100: <what>", or
  /// "training.seq_len = 2048 (default): <what>"; only "training.seq_len: <what>" for a job made in code.
  std::string problem(std::string_view name, std::string_view what) const;

  struct Origin {
    std::string place;  ///< file:line:column; empty on the command line
    std::string shown;  ///< the value as written
  };
  void set(const std::string& name, Origin origin) { given_.insert_or_assign(name, std::move(origin)); }
  void set_default(const std::string& name, std::string shown) {
    defaults_.insert_or_assign(name, std::move(shown));
  }

 private:
  std::map<std::string, Origin, std::less<>> given_;
  std::map<std::string, std::string, std::less<>> defaults_;
};

struct Section {
  std::string name;
  std::string meaning;
  std::vector<FieldInfo> fields;  ///< get and set take the whole job; empty for a dynamic section

  // Only in a dynamic section:
  std::function<DynamicTable(const void* job, const Origins&)> resolve;
  std::function<DynamicTable&(void* job)> table_of;
  std::vector<std::string> depends_on;
};

class Schema {
 public:
  /// The member initializers of a default-constructed Job are the defaults.
  template <class Job>
  static Schema of() {
    return Schema(typeid(Job), std::make_shared<const Job>());
  }

  /// A table, whose fields `describe` of its struct adds.
  template <class Job, class S>
  void add(std::string section, S Job::*member, std::string meaning = {}) {
    check_job(typeid(Job));
    Table<S> table;
    describe(table);
    Section added{std::move(section), std::move(meaning), {}, {}, {}, {}};
    for (const FieldInfo& field : table.fields()) added.fields.push_back(detail::rebased(field, member));
    add_section(std::move(added));
  }

  /// A table whose fields `resolve` returns once the tables `depends_on` are read without a problem.
  /// `resolve` gets the job read so far and, if it takes it, an Origins for messages. A ConfigError that it
  /// throws joins the other problems. Help shows the table of a default job. `table` is a member of the job,
  /// or a function from Job& to DynamicTable&.
  template <class Job, class Table, class Resolve>
  void add_dynamic(std::string section, Table table, Resolve resolve, std::vector<std::string> depends_on,
                   std::string meaning = {}) {
    check_job(typeid(Job));
    Section added{std::move(section), std::move(meaning), {}, {}, {}, std::move(depends_on)};
    added.resolve = [resolve = std::move(resolve)](const void* any_job,
                                                   const Origins& origins) -> DynamicTable {
      const Job& job = *static_cast<const Job*>(any_job);
      if constexpr (std::is_invocable_v<const Resolve&, const Job&, const Origins&>) {
        return resolve(job, origins);
      } else {
        return resolve(job);
      }
    };
    added.table_of = [table](void* job) -> DynamicTable& {
      return std::invoke(table, *static_cast<Job*>(job));
    };
    add_section(std::move(added));
  }

  /// `finish` gets the job once everything is read without a problem. It may replace a value that stands for
  /// others ("auto"). A ConfigError that it throws is reported like any problem.
  template <class Job>
  void set_finish(std::function<void(Job&, const Origins&)> finish) {
    check_job(typeid(Job));
    finish_ = [finish = std::move(finish)](void* job, const Origins& origins) {
      finish(*static_cast<Job*>(job), origins);
    };
  }
  void finish(void* job, const Origins& origins) const {
    if (finish_) finish_(job, origins);
  }

  const std::vector<Section>& sections() const { return sections_; }
  /// The field with that full name, or nullptr. Doesn't find dynamic fields.
  const FieldInfo* find(std::string_view full_name) const;
  const std::type_info& job_type() const { return *job_type_; }
  /// A default Job, for get().
  const void* defaults() const { return defaults_.get(); }

 private:
  Schema(const std::type_info& job_type, std::shared_ptr<const void> defaults)
      : job_type_(&job_type), defaults_(std::move(defaults)) {}
  void check_job(const std::type_info& type) const;
  void add_section(Section section);

  const std::type_info* job_type_;
  std::shared_ptr<const void> defaults_;
  std::vector<Section> sections_;
  std::function<void(void*, const Origins&)> finish_;
};

// ---- loading

struct Sources {
  std::filesystem::path file;          ///< empty: defaults and overrides only
  std::vector<std::string> overrides;  ///< command-line words, from the first `--section.key` on
  /// TOML to read instead of the file, whose name then only appears in messages. Includes aren't read.
  std::string toml = {};
};

namespace detail {
Origins load_into(const Schema& schema, const Sources& sources, void* scratch);
}  // namespace detail

/// Fills `job`; fields that nothing sets keep their value. Leaves it unchanged if it throws ConfigError.
template <class Job>
Origins load(const Schema& schema, const Sources& sources, Job& job) {
  TITAN_CHECK(schema.job_type() == typeid(Job), "this schema describes a struct other than the one to fill");
  Job scratch = job;
  Origins origins = detail::load_into(schema, sources, &scratch);
  job = std::move(scratch);
  return origins;
}

/// The last value of `--name value` or `--name=value` in `words`. The command line finds job.config_file this
/// way, before anything is loaded.
std::optional<std::string> override_value(const std::vector<std::string>& words, std::string_view name);

// ---- settings and their descriptions as text

/// A job of any struct; its schema knows which.
struct JobRef {
  template <class Job>
  JobRef(const Job& job) : type(typeid(Job)), address(&job) {}
  const std::type_info& type;
  const void* address;
};

/// Every setting with its value, as TOML that load() reads back to equal values. Unset optional fields become
/// comments; keys that are refused or have no effect are left out.
std::string print_toml(const Schema& schema, JobRef job);
/// The same as JSON; unset optional fields are null.
std::string print_json(const Schema& schema, JobRef job);

/// Reads what print_toml wrote, without a schema: full name -> value as TOML.
std::map<std::string, std::string> printed_settings(const std::string& toml);

/// Compares two texts of print_toml: lines like "training.steps: 10 | 20", with "unset" for a missing
/// setting. Skips the tables in `other_than`.
std::vector<std::string> setting_differences(const std::string& a, const std::string& b,
                                             const std::vector<std::string>& other_than = {});

/// One entry per key for a terminal, grouped by table: flag, type, meaning, allowed values, default. Dynamic
/// tables are those of `job`, with the values that it gets unless it sets others; without it, those of a
/// default job.
std::string help_text(const Schema& schema, size_t columns = 110);
std::string help_text(const Schema& schema, JobRef job, size_t columns = 110);

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
