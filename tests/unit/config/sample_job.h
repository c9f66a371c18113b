#pragma once

// A small program's settings, with every kind of field, for the tests of this folder.

#include <cstdlib>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "core/file.h"
#include "titan/config/load.h"
#include "titan/config/table.h"

namespace titan::config::sample {

struct Loader {
  int64_t num_workers = 0;
  bool pin_memory = false;
  bool operator==(const Loader&) const = default;
};

struct Training {
  std::string dataset = "c4";
  std::optional<std::string> dataset_path;
  int64_t seq_len = 2048;
  int64_t steps = 10000;
  int64_t global_batch_size = -1;
  double max_norm = 1.0;
  bool enable_cpu_offload = false;
  std::string dtype = "float32";
  Loader dataloader{.num_workers = 2};
  bool operator==(const Training&) const = default;
};

struct Optimizer {
  std::string name = "AdamW";
  double lr = 8e-4;
  double beta1 = 0.9;
  std::optional<double> eps;
  std::optional<int64_t> seed;
  std::optional<bool> fused;
  StringList groups;
  std::vector<StringList> stages;
  bool operator==(const Optimizer&) const = default;
};

struct Validation {
  bool enable = false;
  int64_t steps = -1;
  int64_t seq_len = 2048;
  bool operator==(const Validation&) const = default;
};

struct Float8 {
  StringList filter_fqns;
  bool operator==(const Float8&) const = default;
};

struct Model {
  std::string name = "small";
  bool operator==(const Model&) const = default;
};

/// The dynamic table [model.args]. Its default depends on model.name.
struct Args {
  int64_t dim = 64;
  bool tie = false;
};

struct Job {
  Model model;
  DynamicTable model_args;
  Training training;
  Optimizer optimizer;
  Validation validation;
  Float8 float8;

  Args& args() const { return *static_cast<Args*>(model_args.settings.get()); }
};

inline void describe(Table<Loader>& table) {
  table.field("num_workers", &Loader::num_workers, "threads", at_least(0));
  table.field("pin_memory", &Loader::pin_memory, "pin");
}

inline void describe(Table<Training>& table) {
  table.field("dataset", &Training::dataset, "data source");
  table.field("dataset_path", &Training::dataset_path, "path");
  table.field("seq_len", &Training::seq_len, "tokens per sequence", at_least(1));
  table.field("steps", &Training::steps, "optimizer steps", at_least(1));
  table.field("global_batch_size", &Training::global_batch_size, "sequences", positive_or_minus_one());
  table.field("max_norm", &Training::max_norm, "clip", above(0));
  table.field("enable_cpu_offload", &Training::enable_cpu_offload, "offload");
  table.field("dtype", &Training::dtype, "storage", one_of({"float32", "bfloat16"}));
  table.refused("gc_debug", false, "there is no garbage collector");
  table.table("dataloader", &Training::dataloader);
}

inline void describe(Table<Optimizer>& table) {
  table.field("name", &Optimizer::name, "algorithm", one_of({"Adam", "AdamW"}));
  table.field("lr", &Optimizer::lr, "peak learning rate", at_least(0));
  table.field("beta1", &Optimizer::beta1, "decay | mean", in_range(0, 1));
  table.field("eps", &Optimizer::eps, "guard", above(0));
  table.field("seed", &Optimizer::seed, "seed");
  table.field("fused", &Optimizer::fused, "fused");
  table.field("groups", &Optimizer::groups, "regexes", one_of({"norm", "bias", "all"}));
  table.field("stages", &Optimizer::stages, "names by stage");
  table.refused("method", {}, "one method is enough");
  table.without_effect("schedule", std::string("1F1B"), "there is one stage");
  table.mapped("learning_rate", "lr", "deprecated");
}

inline void describe(Table<Validation>& table) {
  table.field("enable", &Validation::enable, "validate");
  table.refused("whole_set", true, "validation is by steps", "enable");
  table.refused("subset", {}, "validation is by steps", "enable");
  table.field("steps", &Validation::steps, "steps", positive_or_minus_one());
  table.field("seq_len", &Validation::seq_len, "tokens per sequence", at_least(1));
}

inline void describe(Table<Float8>& table) { table.field("filter_fqns", &Float8::filter_fqns, "skipped"); }

inline void describe(Table<Model>& table) { table.field("name", &Model::name, "which"); }

inline void describe(Table<Args>& table) {
  table.field("dim", &Args::dim, "width", at_least(1));
  table.field("tie", &Args::tie, "one matrix for both ends");
}

inline DynamicTable args_of(const Job& job, const Origins& origins) {
  if (job.model.name != "small" && job.model.name != "large")
    throw ConfigError(origins.problem("model.name", "unknown model"));
  Table<Args> table;
  describe(table);
  return {table.fields(), std::make_shared<Args>(Args{.dim = job.model.name == "small" ? 64 : 4096})};
}

inline Schema schema() {
  auto schema = Schema::of<Job>();
  schema.add("model", &Job::model, "what is trained");
  schema.add_dynamic<Job>("model.args", &Job::model_args, args_of, {"model"}, "sizes");
  schema.add("training", &Job::training);
  schema.add("optimizer", &Job::optimizer);
  schema.add("validation", &Job::validation);
  schema.add("quantize.linear.float8", &Job::float8);
  return schema;
}

/// A folder for config files. It is the current folder during its lifetime, so messages hold plain names.
class ConfigFolder {
 public:
  ConfigFolder() : before_(std::filesystem::current_path()) {
    std::string pattern = (std::filesystem::temp_directory_path() / "titan_config_XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) throw Error("no temporary folder");
    std::filesystem::current_path(folder_ = pattern);
  }
  ~ConfigFolder() {
    std::filesystem::current_path(before_);
    std::filesystem::remove_all(folder_);
  }
  void write(const std::string& name, const std::string& text) const {
    std::filesystem::path path = folder_ / name;
    make_folder(path.parent_path());
    write_file_atomic(path, text);
  }

 private:
  std::filesystem::path before_;
  std::filesystem::path folder_;
};

struct Result {
  Job job;
  Origins origins;
  std::vector<std::string> problems;
};

inline Result load_sample(const Sources& sources) {
  Result result;
  try {
    result.origins = load(schema(), sources, result.job);
  } catch (const ConfigError& error) {
    result.problems = error.problems();
  }
  return result;
}

/// Loads a file with this text.
inline Result load_text(const std::string& text, const std::string& name = "a.toml",
                        std::vector<std::string> overrides = {}) {
  ConfigFolder folder;
  folder.write(name, text);
  return load_sample({name, std::move(overrides)});
}

inline Result load_words(std::vector<std::string> overrides) {
  return load_sample({{}, std::move(overrides)});
}

using Problems = std::vector<std::string>;

}  // namespace titan::config::sample
