#pragma once

// When a run saves, and what it starts from: [checkpoint], between the trainer and the checkpointer.

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "titan/checkpoint/checkpointer.h"
#include "titan/checkpoint/hugging_face.h"
#include "titan/dist/world.h"
#include "titan/parallel/parameters.h"
#include "titan/train/checkpoint_settings.h"
#include "titan/train/checkpoint_state.h"

namespace titan::train {

/// The key of Float8's delayed scales in a checkpoint. It is optional: a run may change its scaling at a resume.
inline constexpr const char* kDelayedScales = "float8_scales";

struct StepChoice;  // src/train/checkpoints/step_choice.h
class PeerSaves;    // src/train/checkpoints/peer_saves.h

/// Of a model that is written alone, in its step's folder.
inline constexpr const char* kModelFile = "model.safetensors";

/// The model alone, written after the last step.
struct ModelExport {
  std::optional<at::ScalarType> dtype;  ///< unset: each parameter's own
  std::optional<HfModel> hf;            ///< set: a folder in Hugging Face's form, in place of one file
  std::filesystem::path hf_assets;      ///< whose tokenizer files go along; empty: none
};

/// Where a run starts whose own folder has no complete step.
struct InitialState {
  std::filesystem::path step_folder;  ///< of a checkpoint; empty: none
  bool model_only = true;             ///< of step_folder
  std::function<void()> load_model;   ///< from anywhere else; empty: the weights are as they were drawn
  std::string setting;                ///< that says so, for messages; empty: none does
};

/// The state in memory of the hosts too, for ranks that are started again.
struct PeerSettings {
  int64_t interval = 1;          ///< steps
  std::filesystem::path folder;  ///< on each host
  std::string job;               ///< the same when the ranks are started again
};

class RunCheckpoints {
 public:
  struct Options {
    CheckpointSettings settings;
    std::filesystem::path folder;  ///< of the steps
    std::string config;            ///< resolved, as TOML
    InitialState initial = {};
    std::optional<ModelExport> model_export = {};  ///< what the last save writes; unset: the whole state
    std::optional<PeerSettings> peers = {};
  };

  /// `parameters`: of this rank's stages, for the model alone. Collective over the world, as are all calls
  /// but add, check and failed.
  RunCheckpoints(const dist::World& world, const Meshes& meshes, std::vector<Parameter> parameters,
                 Options options);
  ~RunCheckpoints();

  /// `object` has to live as long. Before load().
  void add(const std::string& key, checkpoint::Stateful& object);
  /// As "rng".
  void add_rng(RngState& rng);

  /// In this order: the step of load_step or the newest complete one in the folder; the initial state;
  /// nothing. A newest step that turns out to be damaged when it is read gives way to the one before. Tells
  /// in the log which, or why not. Throws ConfigError for a step that was asked for and isn't complete. True:
  /// the run goes on from its own folder.
  bool load();

  /// The newest complete step of this run before `step`, where training goes back: all objects but `exclude`.
  /// Of this run are those that it saved, and those up to the one that it went on from: behind that one may
  /// be another run's. A damaged one gives way to the one before. Unset: there is none, and nothing is
  /// loaded. Nothing may be under way.
  std::optional<int64_t> load_before(int64_t step, const std::vector<std::string>& exclude);

  /// After `step`. Throws as Checkpointer::save does; of the last step whatever fails. A save may be skipped,
  /// or fail where training goes on without: see is_saved.
  bool is_due(int64_t step, bool is_last) const;
  void save(int64_t step, bool is_last);
  /// The whole state, complete or throwing whatever fails. What is under way is awaited first.
  void save_whole(int64_t step);
  /// Whether the last save was of `step`, the whole state or what the run leaves at its end, and is complete.
  /// Nothing may be under way.
  bool is_saved(int64_t step) const;
  /// Whether the newest step in the folder is `step`, as the model alone, which a run leaves at its end.
  /// Never of runs that only load, or began at a step of their choice.
  bool has_model_alone(int64_t step) const;
  /// The model, as step 0.
  void save_seed();

  /// In memory of the hosts, in place of or before the save on disk. What goes wrong there is logged.
  bool is_due_in_memory(int64_t step) const;
  void save_in_memory(int64_t step);
  /// What memory holds may be newer than all that is on disk.
  bool keeps_in_memory() const { return peers_ != nullptr; }
  /// The run went on from there: what it loaded isn't on disk.
  bool went_on_from_memory() const { return from_memory_; }

  /// Before the state changes.
  void wait_for_staging();
  /// Throws where a save in the background has lost ranks.
  void check();
  /// A save in the background has failed, as far as this rank knows: all ranks stop at one place.
  bool failed() const;
  /// Nothing is under way afterwards; throws what went wrong in the background.
  void finish();
  /// Finishes a run whose state is on disk: what is in memory is removed.
  void end();
  double take_blocked_seconds();

 private:
  bool load_newest();
  std::optional<int64_t> find_step() const;
  StepChoice choose() const;
  void tell_newer_steps(int64_t wanted) const;
  void load_or_fall_back(int64_t step);
  void load_step(int64_t step);
  bool load_from_memory(std::optional<int64_t> on_disk);
  checkpoint::Loaded load_generation(const std::filesystem::path& folder);
  void announce_peers(bool goes_on);
  void load_initial();
  checkpoint::Loaded load_whole(const std::filesystem::path& step_folder, std::vector<std::string> exclude);
  void go_back_to(int64_t step, std::vector<std::string> exclude);
  StepChoice choose_before(int64_t step) const;
  bool is_of_this_run(int64_t step) const;
  void start_save(int64_t step);
  void load_model_of(const std::filesystem::path& step_folder);
  void tell_loaded(const checkpoint::Loaded& loaded, const std::filesystem::path& step_folder) const;
  void check_exclusions() const;
  void export_model(int64_t step);
  void write_model(const std::filesystem::path& folder) const;

  dist::World world_;
  DeviceMesh pipeline_;
  std::vector<Parameter> parameters_;
  Options options_;
  checkpoint::Checkpointer checkpointer_;
  std::unique_ptr<PeerSaves> peers_;  // null: nothing is kept in memory
  bool from_memory_ = false;
  std::vector<std::string> keys_;
  RngState* rng_ = nullptr;
  int64_t loaded_step_ = -1;       // what the run went on from, or is back before; -1: it hasn't begun
  std::set<int64_t> saved_steps_;  // that began to be saved, and weren't gone back beyond
  int64_t last_saved_ = -1;        // the last of these; last_failure() may be of one that never began
  int64_t exported_step_ = -1;     // whose model is the run's result
};

}  // namespace titan::train
