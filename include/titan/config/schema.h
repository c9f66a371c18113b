#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "titan/config/table.h"

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

// All tables of a program, in order, over one aggregate struct.
//
//   struct JobConfig { TrainingSettings training; OptimizerSettings optimizer; DynamicTable model_args; };
//   auto schema = Schema::of<JobConfig>();
//   schema.add("training", &JobConfig::training, "what a step is made of");
//
// A key's full name is "section.key"; sections may hold dots (`quantize.linear.float8`).

/// Settings whose fields depend on other settings: the model decides what `[model.args]` contains. Copies
/// share `settings`.
struct DynamicTable {
  std::vector<FieldInfo> fields;   ///< get and set take settings.get()
  std::shared_ptr<void> settings;  ///< starts with the defaults; nullptr: no such table
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
  static Schema of();

  /// A table, whose fields `describe` of its struct adds.
  template <class Job, class S>
  void add(std::string section, S Job::*member, std::string meaning = {});

  /// A table whose fields `resolve` returns once the tables `depends_on` are read without a problem.
  /// `resolve` gets the job read so far and, if it takes it, an Origins for messages. A ConfigError that it
  /// throws joins the other problems. Help shows the table of a default job. `table` is a member of the job,
  /// or a function from Job& to DynamicTable&.
  template <class Job, class Table, class Resolve>
  void add_dynamic(std::string section, Table table, Resolve resolve, std::vector<std::string> depends_on,
                   std::string meaning = {});

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
};

template <class Job>
Schema Schema::of() {
  return Schema(typeid(Job), std::make_shared<const Job>());
}

template <class Job, class S>
void Schema::add(std::string section, S Job::*member, std::string meaning) {
  check_job(typeid(Job));
  Table<S> table;
  describe(table);
  Section added{std::move(section), std::move(meaning), {}, {}, {}, {}};
  for (const FieldInfo& field : table.fields()) added.fields.push_back(detail::rebased(field, member));
  add_section(std::move(added));
}

template <class Job, class Table, class Resolve>
void Schema::add_dynamic(std::string section, Table table, Resolve resolve,
                         std::vector<std::string> depends_on, std::string meaning) {
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

}  // namespace titan::config
