// Checks the files that a job reads before anything is started, so a wrong name costs no minute of a cluster.

#include <algorithm>
#include <cctype>
#include <filesystem>

#include "data/feed/feeds.h"
#include "data/sources/files.h"
#include "job/checkpoint_job.h"
#include "job/job_config.h"
#include "titan/checkpoint/step_folder.h"
#include "titan/checkpoint/storage.h"
#include "titan/data/source.h"
#include "titan/data/tokenizer.h"

namespace titan::train {

namespace {

namespace fs = std::filesystem;

constexpr const char* kRecorded = "tokens";

struct FileCheck {
  const JobConfig& config;
  const config::Origins& origins;
  std::vector<std::string>& problems;

  void report(const std::string& key, const std::string& what) {
    problems.push_back(origins.problem(key, what));
  }

  /// Reports the errors of `action` as problems of `key`.
  template <class Action>
  void judge(const std::string& key, Action action) {
    try {
      action();
    } catch (const ConfigError& error) {
      for (const std::string& problem : error.problems()) report(key, problem);
    } catch (const Error& error) {
      report(key, error.what());
    }
  }
};

bool is_there(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

bool is_folder(const fs::path& path) {
  std::error_code ignored;
  return fs::is_directory(path, ignored);
}

/// The place where a setting's file was looked for.
std::string place_of(const fs::path& path) {
  if (path.is_absolute()) return path.string();
  const fs::path here = fs::current_path();
  return str((here / path).lexically_normal().string(),
             " (relative to the working directory, not to the config file)");
}

/// The data of [training] or [validation].
struct DatasetUse {
  std::string table;
  std::string dataset;
  std::string path;
  std::optional<int64_t> global_batch;  ///< sequences; unset: not to be judged
  std::string batch_key;                ///< which setting decides it
  int64_t seq_len = 0;
  std::optional<int64_t> steps;  ///< how many will be read; unset: as many as there are

  std::string key(const char* name) const { return table + "." + name; }
};

std::string unknown_dataset(const std::string& name) {
  std::vector<std::string> known = data::source_kinds().names();
  known.push_back(kRecorded);
  std::string listed;
  for (const std::string& each : known) listed += (listed.empty() ? "" : ", ") + each;
  auto near = nearest_names(name, known, 1);
  return str("unknown data set; known: ", listed,
             near.empty() ? "" : str("; did you mean '", near.front(), "'?"));
}

void check_path(FileCheck& check, const DatasetUse& use) {
  if (is_there(use.path)) return;
  if (!data::is_glob(use.path)) {
    check.report(use.key("dataset_path"), "there is nothing at " + place_of(use.path));
  } else if (data::expand_glob(use.path).empty()) {
    check.report(use.key("dataset_path"), "nothing matches " + place_of(use.path));
  }
}

// Only a user's own kind of source knows what a path means to it.
void check_source(FileCheck& check, const DatasetUse& use) {
  std::string kind = use.dataset;
  std::transform(kind.begin(), kind.end(), kind.begin(), [](unsigned char c) { return std::tolower(c); });
  if (!data::source_kinds().contains(kind))
    return check.report(use.key("dataset"), unknown_dataset(use.dataset));
  const bool needs_path = kind == "text" || kind == "jsonl";
  if (needs_path && use.path.empty())
    return check.report(use.key("dataset"),
                        str("needs ", use.key("dataset_path"), ": a file, a folder or a glob"));
  if ((needs_path || kind == "cpp_headers") && !use.path.empty()) check_path(check, use);
}

void check_recorded_shape(FileCheck& check, const DatasetUse& use, const std::array<int64_t, 3>& shape) {
  const auto [steps, batch, seq_len] = shape;
  if (use.steps && *use.steps > steps)
    check.report(use.key("steps"), str("is more than the ", steps, " steps recorded in ", use.path));
  if (use.global_batch && *use.global_batch != batch)
    check.report(use.batch_key, str("makes batches of ", *use.global_batch, " sequences, but ", use.path,
                                    " records batches of ", batch));
  if (use.seq_len != seq_len)
    check.report(use.key("seq_len"), str("isn't the ", seq_len, " tokens of the sequences in ", use.path));
}

void check_recording(FileCheck& check, const DatasetUse& use) {
  const std::string key = use.key("dataset_path");
  for (const char* name : {"input.npy", "labels.npy"}) {
    if (!use.path.empty() && is_there(fs::path(use.path) / name)) continue;
    const std::string missing =
        use.path.empty() ? "" : str("there is no ", place_of(fs::path(use.path) / name), "; ");
    return check.report(key, str(missing, "\"tokens\" wants a folder with input.npy and labels.npy"));
  }
  check.judge(key, [&] {
    const data::NpyArray input(fs::path(use.path) / "input.npy"), labels(fs::path(use.path) / "labels.npy");
    if (input.shape() != labels.shape()) throw ConfigError("input.npy and labels.npy have different shapes");
    check_recorded_shape(check, use, input.shape());
  });
}

void check_dataset(FileCheck& check, const DatasetUse& use) {
  use.dataset == kRecorded ? check_recording(check, use) : check_source(check, use);
}

void check_training_data(FileCheck& check, std::optional<int> dp_degree) {
  const TrainingSettings& training = check.config.training;
  const bool is_given = training.global_batch_size > 0;
  std::optional<int64_t> batch;
  if (is_given) batch = training.global_batch_size;
  if (!is_given && dp_degree) batch = training.local_batch_size * *dp_degree;
  check_dataset(check, {.table = "training",
                        .dataset = training.dataset,
                        .path = training.dataset_path.value_or(""),
                        .global_batch = batch,
                        .batch_key = is_given ? "training.global_batch_size" : "training.local_batch_size",
                        .seq_len = training.seq_len,
                        .steps = training.steps});
}

void check_validation_data(FileCheck& check, std::optional<int> dp_degree) {
  const ValidationSettings& validation = check.config.validation;
  if (!validation.enable) return;
  std::optional<int64_t> batch;
  if (dp_degree) batch = validation.local_batch_size * *dp_degree;
  check_dataset(check, {.table = "validation",
                        .dataset = validation.dataset,
                        .path = validation.dataset_path.value_or(""),
                        .global_batch = batch,
                        .batch_key = "validation.local_batch_size",
                        .seq_len = validation.seq_len,
                        .steps = std::nullopt});
}

std::shared_ptr<const data::Tokenizer> check_tokenizer(FileCheck& check) {
  const JobConfig& config = check.config;
  const bool validation_reads_text = config.validation.enable && config.validation.dataset != kRecorded;
  if (config.training.dataset == kRecorded && !validation_reads_text) return nullptr;
  constexpr const char* kKey = "model.hf_assets_path";
  const fs::path assets = config.model.hf_assets_path;
  const fs::path file = is_folder(assets) ? assets / "tokenizer.json" : assets;
  if (!data::names_tokenizer_kind(assets.string()) && !is_there(file)) {
    check.report(
        kKey, str("there is no ", place_of(file), "; allowed: a folder with tokenizer.json, or \"bytes\""));
    return nullptr;
  }
  std::shared_ptr<const data::Tokenizer> tokenizer;
  check.judge(kKey, [&] {
    tokenizer = data::build_tokenizer(assets);
    data::check_vocabulary(*tokenizer, config.spec().sizes(config.args()).vocab_size);
  });
  return tokenizer;
}

std::string steps_in(const fs::path& folder) {
  std::string steps;
  for (const checkpoint::StepEntry& entry : checkpoint::list_steps(folder))
    steps += str(steps.empty() ? "" : ", ", entry.path.filename().string());
  return steps.empty() ? "" : str("; it holds steps, of which one has to be named: ", steps);
}

void check_initial_state(FileCheck& check) {
  const CheckpointSettings& checkpoint = check.config.checkpoint;
  if (!checkpoint.enable) return;
  // A run that resumes from a step of its own doesn't need it any more.
  std::vector<std::string> ignored;
  if (checkpoint::newest_complete(checkpoint::joined(check.config.job.dump_folder, checkpoint.folder),
                                  ignored))
    return;
  constexpr const char* kKey = "checkpoint.initial_load_path";
  const InitialSource source = initial_source(check.config);
  if (source.kind == InitialKind::HuggingFace)
    return check.judge(checkpoint.initial_load_path ? kKey : "model.hf_assets_path",
                       [&] { check_hf_config(check.config, source.path); });
  if (source.kind == InitialKind::Nothing)
    return check.report(kKey, str("there is no safetensors file at ", place_of(source.path),
                                  ", nor a step's folder", steps_in(source.path)));
  if (source.kind == InitialKind::ModelFile && !checkpoint.initial_load_model_only)
    return check.report("checkpoint.initial_load_model_only",
                        str(source.path.string(), " holds the model alone"));
  if (source.kind == InitialKind::Step)
    for (const std::string& problem : checkpoint::quick_problems(source.path)) check.report(kKey, problem);
}

}  // namespace

CheckedFiles check_files(const JobConfig& config, const config::Origins& origins,
                         std::optional<int> dp_degree, std::vector<std::string>& problems) {
  FileCheck check{config, origins, problems};
  CheckedFiles files{.tokenizer = check_tokenizer(check)};
  check_training_data(check, dp_degree);
  check_validation_data(check, dp_degree);
  check_initial_state(check);
  return files;
}

}  // namespace titan::train
