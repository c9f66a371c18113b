// Trainer: what is loaded and saved, and when.

#include <utility>

#include "titan/core/error.h"
#include "titan/core/log.h"
#include "titan/train/trainer.h"
#include "train/checkpoints/run_checkpoints.h"

namespace titan::train {

bool Trainer::load() {
  const PhaseScope load = phase(Phase::Load);
  return parts_.checkpoints && parts_.checkpoints->load();
}

// The state is a checkpoint's again, but the data goes on. That is saved after the next step, so that a run
// that is killed and started again doesn't go through the same data again.
bool Trainer::load_before(int64_t step) {
  TITAN_CHECK(parts_.checkpoints, "there are no checkpoints to go back to");
  parts_.checkpoints->finish();
  if (!parts_.checkpoints->load_before(step, {"dataloader"})) return false;
  parts_.window.forget_tokens_seen();
  for (const auto& observer : parts_.observers) observer->begin_after(progress_.step);
  started_at_ = progress_.step;
  save_is_late_ = true;
  last_step_ = last_step();
  return true;
}

void Trainer::save_seed() {
  const PhaseScope finish = phase(Phase::Finish);
  if (options_.on_start) options_.on_start();
  const PhaseScope save = phase(Phase::Save);
  parts_.checkpoints->save_seed();
}

void Trainer::save_if_due() {
  if (!parts_.checkpoints) return;
  parts_.checkpoints->check();
  const int64_t step = progress_.step;
  const bool is_last = step == last_step_;
  const bool to_disk = save_is_late_ || parts_.checkpoints->is_due(step, is_last);
  if (!to_disk && !parts_.checkpoints->is_due_in_memory(step)) return;
  for (const auto& [name, policy] : parts_.policies) policy->before_save(*this);
  save(is_last, to_disk);
}

// Numbers that aren't finite aren't saved, so late ones are read first. A rotation after such a save would
// throw away the last state that was sound.
void Trainer::save(bool is_last, bool to_disk) {
  const PhaseScope save = phase(Phase::Save);
  settle();
  const int64_t step = progress_.step;
  std::string reason;
  for (const auto& [name, policy] : parts_.policies)
    if (reason.empty()) reason = policy->why_not_save();
  if (!reason.empty() && !is_last) {
    if (to_disk && !std::exchange(save_is_late_, true))
      log::warning_rank0(str("step ", step, " isn't saved: ", reason));
    return;
  }
  save_is_late_ = false;
  if (!is_last && parts_.checkpoints->is_due_in_memory(step)) parts_.checkpoints->save_in_memory(step);
  if (to_disk) parts_.checkpoints->save(step, is_last);
}

// Whether the state is saved is known only when no save is under way: one may have failed, or was skipped
// while another was running. Operators search the log for "is saved", so it is said only once it is true.
void Trainer::save_at_stop(const std::string& reason) {
  if (!is_loaded_)
    return log::info_rank0(reason +
                           " stops the run before it began: nothing was loaded, and nothing was trained");
  const std::string what = str(reason, " stops the run after step ", progress_.step);
  RunCheckpoints* checkpoints = parts_.checkpoints.get();
  const PhaseScope save = phase(Phase::Save);
  if (checkpoints) checkpoints->finish();
  if (progress_.step == started_at_) {
    log::info_rank0(what + ", at which it began: nothing was trained");
  } else if (!checkpoints || !checkpoints->is_due(progress_.step, /*is_last=*/true)) {
    log::warning_rank0(what + ": nothing is saved, as [checkpoint] says");
  } else if (checkpoints->is_saved(progress_.step)) {
    log::info_rank0(what + ", whose state is saved");
  } else {
    log::info_rank0(what + ": its state is being saved");
    for (const auto& [name, policy] : parts_.policies) policy->before_save(*this);
    checkpoints->save_whole(progress_.step);
    log::info_rank0(str("the state after step ", progress_.step, " is saved"));
  }
}

// A rank whose save failed throws that error here; the others say where to look.
void Trainer::fail_with_save() {
  const PhaseScope save = phase(Phase::Save);
  if (parts_.checkpoints) parts_.checkpoints->finish();
  throw Error("a checkpoint has failed on another rank, which says why");
}

}  // namespace titan::train
