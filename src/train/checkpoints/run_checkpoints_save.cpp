// RunCheckpoints: what is saved, and when.

#include <unistd.h>
#include <chrono>
#include <exception>
#include <functional>

#include "core/file.h"
#include "titan/checkpoint/hugging_face.h"
#include "titan/checkpoint/safetensors.h"
#include "titan/checkpoint/step_folder.h"
#include "titan/checkpoint/storage.h"
#include "titan/core/error.h"
#include "titan/core/log.h"
#include "train/checkpoints/peer_saves.h"
#include "train/checkpoints/run_checkpoints.h"
#include "train/checkpoints/step_choice.h"

namespace titan::train {

namespace {

namespace fs = std::filesystem;

constexpr dist::Label kExportLabel{"train::export_model"};

// Runs `part` on rank 0; all ranks throw what it throws.
void on_rank_0(const dist::World& world, const std::function<void()>& part) {
  std::string problem;
  try {
    if (world.rank() == 0) part();
  } catch (const std::exception& error) {
    problem = error.what();
  }
  problem = world.everyone()->all_gather_text(problem, kExportLabel).front();
  if (!problem.empty()) throw Error(problem);
}

}  // namespace

bool RunCheckpoints::is_due(int64_t step, bool is_last) const {
  const CheckpointSettings& settings = options_.settings;
  if (settings.load_only) return false;
  return is_last || (settings.enable_first_step_checkpoint && step == 1) || step % settings.interval == 0;
}

void RunCheckpoints::wait_for_staging() {
  checkpointer_.wait_for_staging();
  if (peers_) peers_->wait_for_staging();
}

void RunCheckpoints::check() {
  if (checkpointer_.lost_ranks()) checkpointer_.check();
}

bool RunCheckpoints::failed() const { return checkpointer_.failed(); }

void RunCheckpoints::finish() {
  checkpointer_.finish();
  if (peers_) peers_->finish();
}

double RunCheckpoints::take_blocked_seconds() {
  return checkpointer_.take_blocked_seconds() + (peers_ ? peers_->take_blocked_seconds() : 0);
}

// The last save is the run's result: it isn't skipped, and the run waits for it.
void RunCheckpoints::save(int64_t step, bool is_last) {
  if (!is_last) return start_save(step);
  if (!options_.model_export) return save_whole(step);
  finish();
  export_model(step);
}

// A save that was skipped, or failed before it was written, leaves the one before as the last.
void RunCheckpoints::start_save(int64_t step) {
  if (!checkpointer_.save(step)) return;
  saved_steps_.insert(step);
  last_saved_ = step;
}

void RunCheckpoints::save_whole(int64_t step) {
  finish();
  start_save(step);
  finish();
  // Even if training continues after a failed save (on_failure).
  if (!is_saved(step)) throw Error(checkpointer_.last_failure());
}

bool RunCheckpoints::is_saved(int64_t step) const {
  return step == exported_step_ || (step == last_saved_ && checkpointer_.last_failure().empty());
}

bool RunCheckpoints::has_model_alone(int64_t step) const {
  if (options_.settings.load_only || options_.settings.load_step >= 0) return false;
  StepChoice alone;
  if (world_.rank() == 0) {
    try {
      const fs::path manifest = checkpoint::step_path(options_.folder, step) / checkpoint::kManifestName;
      if (last_step_in(options_.folder) == step &&
          checkpoint::storage_of(manifest).status(manifest).kind == checkpoint::Storage::Kind::Nothing)
        alone.step = step;
    } catch (const std::exception& error) {
      alone.failure = error.what();
    }
  }
  return share(alone, world_).step.has_value();
}

void RunCheckpoints::save_seed() {
  save_whole(0);
  log::info_rank0(str("the seed checkpoint is in ", checkpoint::step_path(options_.folder, 0).string()));
}

// A step's folder gets its name once everything in it is written, as for whole states.
void RunCheckpoints::export_model(int64_t step) {
  // The ranks wait for the one that writes, which may take longer than a step's collectives may.
  world_.set_timeout(std::chrono::seconds(options_.settings.timeout_seconds));
  const std::string id = checkpoint::digest_of(str(::getpid(), " ", step, " ", options_.config));
  const fs::path pending = checkpoint::pending_path(options_.folder, step, id);
  on_rank_0(world_, [&] { make_folder(pending); });
  try {
    write_model(pending);
  } catch (const Error&) {
    std::error_code ignored;  // the next run tries again
    if (world_.rank() == 0) fs::remove_all(pending, ignored);
    throw;
  }
  on_rank_0(world_, [&] { checkpoint::commit_step(options_.folder, step, id); });
  exported_step_ = step;
  const fs::path folder = checkpoint::step_path(options_.folder, step);
  log::info_rank0(
      str("the model is in ", (options_.model_export->hf ? folder : folder / kModelFile).string()));
}

void RunCheckpoints::write_model(const fs::path& folder) const {
  const ModelExport& how = *options_.model_export;
  if (how.hf)
    save_hf_model(parameters_, *how.hf, folder,
                  {.folder = {.assets = how.hf_assets, .in_place = true},
                   .export_dtype = how.dtype,
                   .pipeline = pipeline_});
  else
    save_model(parameters_, folder / kModelFile, how.dtype, pipeline_);
}

}  // namespace titan::train
