#include "train/checkpoints/run_checkpoints.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <limits>

#include <ATen/Parallel.h>
#include <c10/util/StringUtil.h>
#include <torch/version.h>

#include "checkpoint/save/checkpointer_impl.h"
#include "checkpoint/save/rank_tree.h"
#include "core/file.h"
#include "core/process.h"
#include "core/units.h"
#include "titan/checkpoint/hugging_face.h"
#include "titan/checkpoint/step_folder.h"
#include "titan/checkpoint/storage.h"
#include "titan/config/load.h"
#include "titan/core/error.h"
#include "titan/core/log.h"
#include "titan/train/trainer.h"
#include "train/checkpoints/peer_saves.h"

namespace titan::train {

namespace {

namespace fs = std::filesystem;

constexpr dist::Label kLabel{"train::checkpoint"};
constexpr dist::Label kExportLabel{"train::export_model"};
constexpr int64_t kAnyStep = std::numeric_limits<int64_t>::max();

checkpoint::SaveOptions save_options(const RunCheckpoints::Options& options) {
  const CheckpointSettings& settings = options.settings;
  if (options.model_export)
    checkpoint::require_local(options.folder, "a folder where checkpoint.last_save_model_only writes");
  if (options.peers)
    checkpoint::require_local(options.folder, "the folder of a run with checkpoint.peer_interval");
  checkpoint::SaveOptions save;
  save.folder = options.folder;
  save.read_only = settings.load_only;
  save.async = async_mode(settings);
  // Staged mode copies during the next forward, in which a user's object may change.
  if (save.async == checkpoint::AsyncMode::Staged && !saved_objects().names().empty())
    save.async = checkpoint::AsyncMode::Copied;
  save.keep_latest = settings.keep_latest_k;
  save.skip_when_busy = settings.when_busy == "skip";
  save.stop_on_failure = settings.on_failure == "stop";
  save.timeout = std::chrono::seconds(settings.timeout_seconds);
  save.config = options.config;
  return save;
}

void warn_skipped(const std::vector<std::string>& problems) {
  for (const std::string& problem : problems) log::warning_rank0("skipped: " + problem);
}

// If settings of the model differ, they are the cause of many tensors' problems, and are named instead. "" if
// they don't.
std::string explained_by_settings(const ConfigError& error, const fs::path& step_folder,
                                  const std::string& saved, const std::string& now) {
  std::vector<std::string> model;
  for (const std::string& line : config::setting_differences(saved, now, {}))
    if (line.starts_with("model.args.") || line.starts_with("model.name:") ||
        line.starts_with("model.flavor:"))
      model.push_back(line);
  const bool is_about_model = std::ranges::any_of(
      error.problems(), [](const std::string& line) { return line.find("'model.") != line.npos; });
  if (model.empty() || !is_about_model) return "";
  return str(step_folder.string(),
             " was saved with another model (its settings | this run's): ", c10::Join("; ", model), ". ",
             error.problems().front());
}

std::string seconds_text(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f s", value);
  return text;
}

// The number of threads determines how sums are split, so only the same number gives the same bits.
void warn_of_differences(const checkpoint::Manifest& manifest) {
  if (manifest.num_threads != at::get_num_threads())
    log::warning_rank0(str("the checkpoint is from a run with ", manifest.num_threads,
                           " thread(s) per operation, this one has ", at::get_num_threads(),
                           ": from here on sums may be rounded differently"));
  const std::string library = str("titan ", kVersion, ", torch ", TORCH_VERSION);
  if (manifest.library != library)
    log::warning_rank0(str("the checkpoint was written by ", manifest.library, ", this is ", library,
                           ": from here on numbers may be rounded differently"));
}

// Compares the settings that may change the result; those of folders and logs don't.
void warn_of_changed_settings(const std::string& saved, const std::string& now) {
  constexpr size_t kMostShown = 20;
  auto changed = config::setting_differences(saved, now, {"job", "metrics", "comm", "checkpoint"});
  if (changed.empty()) return;
  const size_t num_changed = changed.size();
  changed.resize(std::min(num_changed, kMostShown));
  if (num_changed > kMostShown) changed.push_back(str("and ", num_changed - kMostShown, " more"));
  log::warning_rank0("settings differ from the checkpoint's (its | this run's): " + c10::Join("; ", changed));
}

// All ranks have found a state in memory to be damaged.
class DamagedGeneration : public Error {
 public:
  using Error::Error;
};

// Runs `part` on rank 0; all ranks throw what it throws.
void on_rank_0(const dist::World& world, const std::function<void()>& part) {
  checkpoint::detail::from_rank_0(world, kExportLabel, [&] {
    part();
    return std::string();
  });
}

}  // namespace

void refuse_damaged(const fs::path& folder, const std::vector<std::string>& damages) {
  throw ConfigError(
      str("no intact checkpoint is left in ", folder.string(), ": ", c10::Join("; ", damages),
          ". To start from the beginning, move the folder away or set another job.dump_folder"));
}

std::vector<std::string> model_misfits(const fs::path& step_folder, const std::vector<Parameter>& parameters,
                                       const std::string& config, bool convert_dtypes) {
  const checkpoint::Manifest manifest = checkpoint::read_manifest(step_folder);
  std::vector<std::string> problems;
  std::set<std::string> names;
  for (const Parameter& parameter : parameters) {
    if (parameter.duplicate) continue;
    names.insert("model." + parameter.name);
    const checkpoint::LoadOptions options{.convert_dtypes = convert_dtypes};
    std::string problem =
        checkpoint::detail::difference_of({"model." + parameter.name, parameter.data}, options, manifest);
    if (!problem.empty()) problems.push_back(str(step_folder.string(), ": ", problem));
  }
  for (const checkpoint::StateTensor& tensor : manifest.table.tensors())
    if (tensor.name.starts_with("model.") && !names.contains(tensor.name))
      problems.push_back(str(step_folder.string(), ": tensor '", tensor.name, "' isn't part of the model"));
  if (problems.empty()) return problems;
  const std::string cause =
      explained_by_settings(ConfigError(problems), step_folder, manifest.config, config);
  return cause.empty() ? problems : std::vector{cause};
}

RunCheckpoints::RunCheckpoints(const dist::World& world, const Meshes& meshes,
                               std::vector<Parameter> parameters, Options options)
    : world_(world),
      pipeline_(meshes.pp),
      parameters_(std::move(parameters)),
      options_(std::move(options)),
      checkpointer_(world, meshes.pp, save_options(options_)) {
  if (options_.peers)
    peers_ = std::make_unique<PeerSaves>(world, meshes.pp, *options_.peers, save_options(options_));
}

RunCheckpoints::~RunCheckpoints() = default;

void RunCheckpoints::add(const std::string& key, checkpoint::Stateful& object) {
  checkpointer_.add(key, object);
  if (peers_) peers_->saver.add(key, object);
  keys_.push_back(key);
}

void RunCheckpoints::add_rng(RngState& rng) {
  rng_ = &rng;
  add("rng", rng);
}

bool RunCheckpoints::load() {
  const bool resumes = load_newest();
  if (peers_) announce_peers(resumes);
  if (world_.device().is_cuda() && !options_.settings.load_only) plan_saves();
  return resumes;
}

// Before training, because a GPU's copies need page-locked memory, which takes long to make.
void RunCheckpoints::plan_saves() {
  try {
    checkpointer_.plan();
  } catch (const Error&) {
    // The first save plans again and fails for the same reason.
  }
}

bool RunCheckpoints::load_newest() {
  const StepChoice choice = find_step();
  const std::optional<int64_t> step = choice.step;
  if (peers_ && load_from_memory(step)) return true;
  if (!step && choice.is_damaged) refuse_damaged(options_.folder, choice.skipped);
  if (!step) {
    load_initial();
    loaded_step_ = 0;
    if (peers_) peers_->folder->forget();
    return false;
  }
  if (!options_.initial.setting.empty())
    log::warning_rank0(str(options_.initial.setting, " isn't used: the run resumes from the steps in ",
                           options_.folder.string()));
  load_or_fall_back(*step);
  // If the disk was damaged, its step may be older than the one in memory, so that is forgotten only now.
  if (peers_ && (loaded_step_ == *step || !load_from_memory(loaded_step_))) peers_->folder->forget();
  return true;
}

void RunCheckpoints::load_step(int64_t step) {
  const fs::path folder = checkpoint::step_path(options_.folder, step);
  if (step == 0) return load_model_of(folder);
  log_loaded(load_whole(folder, options_.settings.exclude_from_loading), folder);
  loaded_step_ = step;
}

// Checksums are compared while tensors are read. If one differs, an older step overwrites what was loaded by
// then, and only a whole one: the run never starts from a partial state.
void RunCheckpoints::load_or_fall_back(int64_t step) {
  if (options_.settings.load_step >= 0) return load_step(step);
  const std::exception_ptr failure = damage_found_by([&] { load_step(step); }, step);
  if (!failure) return;
  const StepChoice before = choose_before(step);
  warn_skipped(before.skipped);
  // Step 0 holds the model alone, so the optimizer would keep what was read until here.
  if (before.step.value_or(0) == 0) {
    std::vector<std::string> damages = before.skipped;
    try {
      std::rethrow_exception(failure);
    } catch (const Error& error) {
      damages.insert(damages.begin(), error.what());
    }
    refuse_damaged(options_.folder, damages);
  }
  load_or_fall_back(*before.step);
}

// Returns null if `load` succeeds. If the step is damaged, logs the damage and returns what `load` threw;
// rethrows any other failure.
std::exception_ptr RunCheckpoints::damage_found_by(const std::function<void()>& load, int64_t step) const {
  std::exception_ptr failure;
  try {
    load();
    return nullptr;
  } catch (const ConfigError&) {
    throw;  // the checkpoint belongs to another run, and looking for damage would take long
  } catch (const Error&) {
    failure = std::current_exception();
  }
  const auto damages = find_damage(checkpoint::step_path(options_.folder, step), world_);
  if (damages.empty()) std::rethrow_exception(failure);
  warn_skipped(damages);
  return failure;
}

void RunCheckpoints::load_initial() {
  const InitialState& initial = options_.initial;
  if (initial.step_folder.empty()) {
    check_exclusions();
    if (initial.load_model) initial.load_model();
    return;
  }
  const bool is_seed = read_summary(initial.step_folder, world_).step == 0;
  if (initial.model_only || is_seed) return load_model_of(initial.step_folder);
  log_loaded(load_whole(initial.step_folder, options_.settings.exclude_from_loading), initial.step_folder);
}

StepChoice RunCheckpoints::choose_before(int64_t step) const {
  return choose_on_rank_0(world_, [&] {
    return choose_newest(options_.folder, step, [this](int64_t each) { return is_of_this_run(each); });
  });
}

// Until a step is loaded, all steps count as this run's.
bool RunCheckpoints::is_of_this_run(int64_t step) const {
  return loaded_step_ < 0 || step <= loaded_step_ || saved_steps_.count(step) > 0;
}

// A later start without load_step would resume from newer steps.
void RunCheckpoints::warn_of_newer_steps(int64_t wanted) const {
  std::string newer;
  for (const checkpoint::StepEntry& entry : checkpoint::list_steps(options_.folder))
    if (entry.step > wanted && entry.has_manifest) newer += str(newer.empty() ? "" : ", ", entry.step);
  if (!newer.empty())
    log::warning(str("checkpoint.load_step = ", wanted, ": newer steps stay in ", options_.folder.string(),
                     " (", newer,
                     "); until this run is past them, a start without load_step resumes from those"));
}

// If rank 0 can't read the folder, all ranks throw Error, not ConfigError: storage that doesn't answer now
// may answer at the next start.
StepChoice RunCheckpoints::find_step() const {
  const int64_t wanted = options_.settings.load_step;
  const StepChoice choice = choose_on_rank_0(world_, [&] {
    if (wanted < 0) return choose_newest(options_.folder, kAnyStep);
    const StepChoice asked_for = choose_step(options_.folder, wanted);
    if (asked_for.error.empty() && !options_.settings.load_only) warn_of_newer_steps(wanted);
    return asked_for;
  });
  if (!choice.error.empty()) throw ConfigError(choice.error);
  warn_skipped(choice.skipped);
  if (!choice.step && !choice.is_damaged)
    log::info_rank0(str("there is no saved state in ", options_.folder.string(), " to resume from"));
  return choice;
}

checkpoint::Loaded RunCheckpoints::load_whole(const fs::path& step_folder, std::vector<std::string> exclude) {
  const ManifestSummary saved = read_summary(step_folder, world_);
  checkpoint::LoadOptions options;
  options.exclude = std::move(exclude);
  options.optional = options_.may_be_missing;
  options.convert_dtypes = options_.settings.convert_dtypes;
  const bool loads_rng =
      rng_ && std::find(options.exclude.begin(), options.exclude.end(), "rng") == options.exclude.end();
  const bool reseeds = loads_rng && saved.rng_place != rng_->place();
  if (reseeds) options.exclude.push_back("rng");
  if (peers_ && step_folder.parent_path() == peers_->folder->path())
    options.bring_files = [folder = peers_->folder](const checkpoint::Manifest& manifest,
                                                    const std::set<int64_t>& ranks) {
      folder->bring_files(manifest, ranks);
    };
  checkpoint::Loaded loaded;
  try {
    loaded = checkpointer_.load(step_folder, options);
  } catch (const ConfigError& error) {
    const std::string cause = explained_by_settings(error, step_folder, saved.config, options_.config);
    if (cause.empty()) throw;
    throw ConfigError(cause);
  }
  if (!reseeds) return loaded;
  rng_->reseed(saved.step);
  log::info_rank0(str("the ranks (", rng_->place(), ") differ from those that saved (",
                      saved.rng_place.empty() ? "unknown" : saved.rng_place,
                      "): random numbers are reseeded from debug.seed, rank and step"));
  return loaded;
}

void RunCheckpoints::log_loaded(const checkpoint::Loaded& loaded, const fs::path& step_folder) const {
  const int64_t num_bytes = world_.everyone()->sum(loaded.num_bytes_read, kLabel);
  std::string excluded;
  for (const std::string& key : options_.settings.exclude_from_loading)
    excluded += (excluded.empty() ? "; not loaded: " : ", ") + key;
  log::info_rank0(str("resuming after step ", loaded.manifest.step, ", loaded from ", step_folder.string(),
                      ": ", size_text(num_bytes), " in ", seconds_text(loaded.seconds), excluded));
  warn_of_differences(loaded.manifest);
  warn_of_changed_settings(loaded.manifest.config, options_.config);
  if (!loaded.manifest.finite)
    log::warning_rank0(str("not all numbers of ", step_folder.string(), " are finite"));
}

void RunCheckpoints::load_model_of(const fs::path& step_folder) {
  check_exclusions();
  checkpoint::LoadOptions options;
  options.only = {"model"};
  options.convert_dtypes = options_.settings.convert_dtypes;
  const checkpoint::Loaded loaded = checkpointer_.load(step_folder, options);
  const int64_t num_bytes = world_.everyone()->sum(loaded.num_bytes_read, kLabel);
  log::info_rank0(str("initial weights come from ", step_folder.string(), ": ", size_text(num_bytes), " in ",
                      seconds_text(loaded.seconds)));
}

// For runs that load no whole state. Checkpointer::load also accepts objects that only the checkpoint has.
void RunCheckpoints::check_exclusions() const {
  std::vector<std::string> problems;
  for (const std::string& problem : unknown_exclusions(options_.settings.exclude_from_loading, keys_))
    problems.push_back("checkpoint.exclude_from_loading: " + problem);
  if (!problems.empty()) throw ConfigError(std::move(problems));
}

// ---- going back within a run

// Step 0, a seed, holds the model alone, so the run can't go back to it. As at a start, an older step
// overwrites what was read of a damaged one.
std::optional<int64_t> RunCheckpoints::load_before(int64_t step, const std::vector<std::string>& exclude) {
  // States in memory are from the steps that are being undone.
  if (peers_) peers_->folder->forget();
  for (std::exception_ptr failure;;) {
    step = choose_before(step).step.value_or(0);
    if (step == 0 && failure) std::rethrow_exception(failure);
    if (step == 0) return std::nullopt;
    failure = damage_found_by([&] { go_back_to(step, exclude); }, step);
    if (!failure) return step;
  }
}

// Objects that were excluded when the run resumed stay excluded in steps that this run didn't save.
void RunCheckpoints::go_back_to(int64_t step, std::vector<std::string> exclude) {
  const auto& left_out = options_.settings.exclude_from_loading;
  if (!saved_steps_.count(step)) exclude.insert(exclude.end(), left_out.begin(), left_out.end());
  static_cast<void>(load_whole(checkpoint::step_path(options_.folder, step), std::move(exclude)));
  saved_steps_.erase(saved_steps_.upper_bound(step), saved_steps_.end());
  loaded_step_ = std::min(loaded_step_, step);
}

// ---- states in the hosts' memory

bool RunCheckpoints::is_due_in_memory(int64_t step) const { return peers_ && peers_->is_due(step); }

// At a run's start, too little memory is a wrong setting. A run that resumes may have lost hosts, so it
// continues without these states: it has just loaded one, and saves on disk continue.
void RunCheckpoints::announce_peers(bool resumes) {
  try {
    peers_->announce();
  } catch (const ConfigError& error) {
    if (!resumes) throw;
    log::warning_rank0(str("no more states are kept in memory: ", error.what()));
    peers_.reset();
  }
}

void RunCheckpoints::save_in_memory(int64_t step) { peers_->save(step); }

void RunCheckpoints::end() {
  finish();
  if (!peers_) return;
  peers_->log_failures();
  if (loaded_step_ >= 0) peers_->remove();
}

// A load that succeeds overwrites what was read of damaged files. If it fails for another reason (a lost
// rank, too little memory), the state in memory may still be sound, and the next start may resume from it.
checkpoint::Loaded RunCheckpoints::load_generation(const std::filesystem::path& folder) {
  while (true) {
    try {
      return load_whole(folder, options_.settings.exclude_from_loading);
    } catch (const ConfigError&) {
      throw;  // the state belongs to another run; it isn't damaged
    } catch (const Error& error) {
      switch (peers_->remove_damaged()) {
        case PeerSaves::Damage::None:
          throw;
        case PeerSaves::Damage::Lost:
          throw DamagedGeneration(error.what());
        case PeerSaves::Damage::Mended:
          break;
      }
    }
  }
}

// The newer state is used, or the one in memory if both are of the same step. An unused state in memory is
// kept until the one on disk is loaded.
bool RunCheckpoints::load_from_memory(std::optional<int64_t> on_disk) {
  const auto step = peers_->folder->choose_newest();
  const bool is_asked_for = options_.settings.load_step >= 0;
  if (!step || is_asked_for || on_disk.value_or(-1) > *step) {
    if (step)
      log::info_rank0(str("peer checkpoints: step ", *step,
                          " in memory isn't used, because the run resumes after step ", on_disk.value_or(0),
                          " on disk"));
    return false;
  }
  log::info_rank0(str("peer checkpoints: step ", *step, " is in memory; the newest on disk is ",
                      on_disk ? str("step ", *on_disk) : "none"));
  try {
    const fs::path folder = checkpoint::step_path(peers_->folder->path(), *step);
    log_loaded(load_generation(folder), folder);
    loaded_step_ = *step;
    from_memory_ = true;
  } catch (const DamagedGeneration& error) {
    log::warning_rank0(str("skipped: step ", *step, " in memory: ", error.what()));
    peers_->folder->forget();
    // Only a whole state overwrites what was read of it. The next start finds nothing in memory.
    if (on_disk.value_or(0) == 0) throw;
  }
  return from_memory_;
}

// ---- saving

bool RunCheckpoints::is_due(int64_t step, bool is_last) const {
  const CheckpointSettings& settings = options_.settings;
  if (settings.load_only) return false;
  return is_last || (settings.enable_first_step_checkpoint && step == 1) || step % settings.interval == 0;
}

void RunCheckpoints::wait_for_staging() {
  checkpointer_.wait_for_staging();
  if (peers_) peers_->saver.wait_for_staging();
}

void RunCheckpoints::check() {
  if (checkpointer_.lost_ranks()) checkpointer_.check();
}

void RunCheckpoints::finish() {
  checkpointer_.finish();
  if (peers_) peers_->finish();
}

double RunCheckpoints::take_blocked_seconds() {
  return checkpointer_.take_blocked_seconds() + (peers_ ? peers_->saver.take_blocked_seconds() : 0);
}

// The last save is the run's result: it isn't skipped, and the run waits for it.
void RunCheckpoints::save(int64_t step, bool is_last) {
  if (!is_last) return start_save(step);
  if (!options_.model_export) return save_whole(step);
  finish();
  export_model(step);
}

// If a save was skipped, or failed before it was written, the one before it remains the last.
void RunCheckpoints::start_save(int64_t step) {
  if (!checkpointer_.save(step)) return;
  saved_steps_.insert(step);
  last_saved_ = step;
}

void RunCheckpoints::save_whole(int64_t step) {
  finish();
  start_save(step);
  finish();
  // Unlike other saves, this one must succeed even if training continues after failures (on_failure).
  if (!is_saved(step)) throw Error(checkpointer_.last_failure());
}

bool RunCheckpoints::is_saved(int64_t step) const {
  return step == exported_step_ || (step == last_saved_ && checkpointer_.last_failure().empty());
}

bool RunCheckpoints::has_model_alone(int64_t step) const {
  if (options_.settings.load_only || options_.settings.load_step >= 0) return false;
  const StepChoice alone = choose_on_rank_0(world_, [&] {
    const fs::path manifest = checkpoint::step_path(options_.folder, step) / checkpoint::kManifestName;
    const bool is_alone =
        last_step_in(options_.folder) == step &&
        checkpoint::storage_of(manifest).status(manifest).kind == checkpoint::Storage::Kind::Nothing;
    return StepChoice{.step = is_alone ? std::optional(step) : std::nullopt};
  });
  return alone.step.has_value();
}

void RunCheckpoints::save_seed() {
  save_whole(0);
  log::info_rank0(str("the seed checkpoint is in ", checkpoint::step_path(options_.folder, 0).string()));
}

// A step's folder gets its name once everything in it is written, as for whole states.
void RunCheckpoints::export_model(int64_t step) {
  // The ranks wait for the slowest disk, which may exceed the time limit of a step's collectives.
  world_.set_timeout(std::chrono::seconds(options_.settings.timeout_seconds));
  const std::string id = checkpoint::digest_of(str(::getpid(), " ", step, " ", options_.config));
  const fs::path pending = checkpoint::pending_path(options_.folder, step, id);
  on_rank_0(world_, [&] { make_folder(pending); });
  try {
    write_model(pending, step);
  } catch (const Error&) {
    std::error_code ignored;  // the next run tries again
    if (world_.rank() == 0 && fs::remove_all(pending, ignored) > 0 && !ignored)
      log::info(str("removed ", pending.string(), ": the model couldn't be written"));
    throw;
  }
  on_rank_0(world_, [&] { checkpoint::commit_step(options_.folder, step, id); });
  exported_step_ = step;
  log::info_rank0(str("the model is in ", checkpoint::step_path(options_.folder, step).string()));
}

void RunCheckpoints::write_model(const fs::path& folder, int64_t step) const {
  const ModelExport& how = *options_.model_export;
  HfWriteOptions folder_options = how.hf_options;
  folder_options.in_place = true;
  folder_options.config = options_.config;
  folder_options.step = step;
  save_model(parameters_, world_, folder,
             {.folder = std::move(folder_options),
              .export_dtype = how.dtype,
              .pipeline = pipeline_,
              .hf = how.hf ? &*how.hf : nullptr});
}

}  // namespace titan::train
