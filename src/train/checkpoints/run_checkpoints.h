#pragma once

// When a run saves, and what it starts from: implements [checkpoint], between the trainer and the
// checkpointer.

#include <exception>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "titan/checkpoint/checkpointer.h"
#include "titan/checkpoint/hugging_face.h"
#include "titan/dist/collectives.h"
#include "titan/dist/world.h"
#include "titan/parallel/parameters.h"
#include "titan/train/checkpoint_state.h"
#include "train/checkpoints/checkpoint_settings.h"

namespace titan::train {

class PeerSaves;  // src/train/checkpoints/peer_saves.h

// ---- the step that a run resumes from: rank 0 looks in the folder and informs all ranks (step_choice.cpp)

struct StepChoice {
  std::optional<int64_t> step = {};       ///< unset: there is none
  std::vector<std::string> skipped = {};  ///< why newer steps aren't used, one line each
  std::string error = {};                 ///< why the requested step can't be loaded; else empty
  bool is_damaged = false;                ///< a newer step is damaged, not just of no use to a resumed run
  static void fields(auto& wire, auto& self) { wire(self.step, self.skipped, self.error, self.is_damaged); }
};

/// Chooses the newest sound step before `before`, judged without reading tensors. A step with non-finite
/// numbers is skipped if there is an older, finite one. `counts`: which steps may be chosen; unset: all.
StepChoice choose_newest(const std::filesystem::path& folder, int64_t before,
                         const std::function<bool(int64_t step)>& counts = {});
/// Chooses the step `wanted`, or says why it can't be loaded.
StepChoice choose_step(const std::filesystem::path& folder, int64_t wanted);

/// Throws ConfigError: a new run in the folder would replace what may still be rescued from it.
[[noreturn]] void refuse_damaged(const std::filesystem::path& folder,
                                 const std::vector<std::string>& damages);

/// Why the state in `step_folder` doesn't fit `parameters`, those of the whole model: their names, shapes and
/// dtypes, or, if settings of the model differ from those of `config`, these instead. Reads the manifest.
std::vector<std::string> model_misfits(const std::filesystem::path& step_folder,
                                       const std::vector<Parameter>& parameters, const std::string& config,
                                       bool convert_dtypes);

/// The newest step of all, even if it holds the model alone; unset if it isn't sound. A model counts as sound
/// if the headers of its files agree with their sizes.
std::optional<int64_t> last_step_in(const std::filesystem::path& folder);

/// Finds damage inside the files. Reads all of them, each on one rank. Collective over the world.
std::vector<std::string> find_damage(const std::filesystem::path& step_folder, const dist::World& world);

/// The part of a manifest that decides how its step is loaded.
struct ManifestSummary {
  int64_t step = 0;
  std::string rng_place;  ///< RngState::place; empty: generators weren't saved
  std::string config;     ///< resolved, as TOML
  static void fields(auto& wire, auto& self) { wire(self.step, self.rng_place, self.config); }
};
/// Rank 0 reads it; if it can't, every rank throws Error. Collective over the world.
ManifestSummary read_summary(const std::filesystem::path& step_folder, const dist::World& world);

/// Rank 0 chooses; if it throws, every rank throws Error. Collective over the world.
StepChoice choose_on_rank_0(const dist::World& world, const std::function<StepChoice()>& choose);

// ---- saving and resuming

/// The model alone, written after the last step.
struct ModelExport {
  std::optional<at::ScalarType> dtype;  ///< unset: each parameter's own
  std::optional<HfModel> hf;            ///< set: in Hugging Face's form, not with our names
  HfWriteOptions hf_options = {};       ///< for that form
};

/// The start of a run whose own folder has no complete step.
struct InitialState {
  std::filesystem::path step_folder;  ///< a checkpoint's step-N folder; empty: none
  bool model_only = true;             ///< load only the model from step_folder
  std::function<void()> load_model;   ///< loads from anywhere else; empty: keeps the initialized weights
  std::string setting;                ///< the setting that chose it, for messages; empty: none
};

/// Checkpoints in the hosts' memory, for ranks that are restarted.
struct PeerSettings {
  int64_t interval = 1;          ///< steps between saves
  std::filesystem::path folder;  ///< on each host
  std::string job;               ///< an id that stays the same when ranks are restarted
};

class RunCheckpoints {
 public:
  struct Options {
    CheckpointSettings settings;
    std::filesystem::path folder;  ///< where the step-N folders are
    std::string config;            ///< resolved, as TOML
    InitialState initial = {};
    std::optional<ModelExport> model_export = {};  ///< form of the last save; unset: the whole state
    std::optional<PeerSettings> peers = {};
    /// Keys of objects that the checkpoint or the run may lack.
    std::vector<std::string> may_be_missing = {};
  };

  /// `parameters`: those of this rank's stages, to export the model. Collective over the world, as are all
  /// calls except add, check and failed.
  RunCheckpoints(const dist::World& world, const Meshes& meshes, std::vector<Parameter> parameters,
                 Options options);
  ~RunCheckpoints();

  /// `object` must outlive this. Call it before load().
  void add(const std::string& key, checkpoint::Stateful& object);
  /// Adds it as "rng".
  void add_rng(RngState& rng);

  /// Loads the first that exists: the step of load_step or the newest complete one in the folder; the initial
  /// state; nothing. If the newest step turns out to be damaged when it is read, the one before it is loaded.
  /// Logs what was loaded, or why nothing was. Throws ConfigError if a requested step isn't complete, or if
  /// no step can be resumed from and at least one is damaged. True: the run resumes from its own folder.
  bool load();

  /// Loads all objects except `exclude` from the newest complete step of this run before `step`, or from an
  /// older one if that is damaged. Steps of this run are those that it saved and those up to the one that it
  /// resumed from; later ones may be another run's. Unset: there is none, and nothing is loaded. No save may
  /// be in progress.
  std::optional<int64_t> load_before(int64_t step, const std::vector<std::string>& exclude);

  /// Saves the state after `step`. Throws as Checkpointer::save does, and for the last step whatever fails. A
  /// save may be skipped, or may fail while training continues: see is_saved.
  bool is_due(int64_t step, bool is_last) const;
  void save(int64_t step, bool is_last);
  /// Saves the whole state, after a save in progress. Throws unless it is complete.
  void save_whole(int64_t step);
  /// Whether the last save was of `step` and is complete, as the whole state or as the exported model. No
  /// save may be in progress.
  bool is_saved(int64_t step) const;
  /// Whether the newest step in the folder is `step` and holds the model alone, as a finished run leaves it.
  /// Always false for runs that only load, or that set load_step.
  bool has_model_alone(int64_t step) const;
  /// Saves the model alone, as step 0.
  void save_seed();

  /// Saves in the hosts' memory, instead of or before the save on disk. Failures are logged.
  bool is_due_in_memory(int64_t step) const;
  void save_in_memory(int64_t step);
  /// Whether states are kept in memory; they may be newer than everything on disk.
  bool keeps_in_memory() const { return peers_ != nullptr; }
  /// Whether the run resumed from the hosts' memory: that state isn't on disk.
  bool resumed_from_memory() const { return from_memory_; }

  /// Waits until no save reads the state. Call it before the state changes.
  void wait_for_staging();
  /// Throws if a save in the background has lost ranks.
  void check();
  /// Whether a save in the background has failed, as far as this rank knows.
  bool failed() const { return checkpointer_.failed(); }
  /// Waits for saves in progress; throws what went wrong with them.
  void finish();
  /// Finishes a run whose state is on disk: removes the states in memory.
  void end();
  double take_blocked_seconds();

 private:
  bool load_newest();
  void plan_saves();
  StepChoice find_step() const;
  void warn_of_newer_steps(int64_t wanted) const;
  void load_or_fall_back(int64_t step);
  std::exception_ptr damage_found_by(const std::function<void()>& load, int64_t step) const;
  void load_step(int64_t step);
  bool load_from_memory(std::optional<int64_t> on_disk);
  checkpoint::Loaded load_generation(const std::filesystem::path& folder);
  void announce_peers(bool resumes);
  void load_initial();
  checkpoint::Loaded load_whole(const std::filesystem::path& step_folder, std::vector<std::string> exclude);
  void go_back_to(int64_t step, std::vector<std::string> exclude);
  StepChoice choose_before(int64_t step) const;
  bool is_of_this_run(int64_t step) const;
  void start_save(int64_t step);
  void load_model_of(const std::filesystem::path& step_folder);
  void log_loaded(const checkpoint::Loaded& loaded, const std::filesystem::path& step_folder) const;
  void check_exclusions() const;
  void export_model(int64_t step);
  void write_model(const std::filesystem::path& folder, int64_t step) const;

  dist::World world_;
  DeviceMesh pipeline_;
  std::vector<Parameter> parameters_;
  Options options_;
  checkpoint::Checkpointer checkpointer_;
  std::unique_ptr<PeerSaves> peers_;  // null: nothing is kept in memory
  bool from_memory_ = false;
  std::vector<std::string> keys_;
  RngState* rng_ = nullptr;
  int64_t loaded_step_ = -1;       // the step that the run resumed from or went back to; -1: none was loaded
  std::set<int64_t> saved_steps_;  // steps whose save began, up to the step that the run went back to
  int64_t last_saved_ = -1;        // the last of these; last_failure() may be about one that never began
  int64_t exported_step_ = -1;     // the step whose model is the run's result
};

}  // namespace titan::train
