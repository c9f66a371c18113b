// Trainer: what is saved and when, a request to stop, a spike, replicas that differ.

#include <utility>

#include "titan/core/error.h"
#include "titan/core/log.h"
#include "titan/train/replica_check.h"
#include "titan/train/trainer.h"
#include "train/policies/interruption.h"
#include "train/policies/late_values.h"

namespace titan::train {

StopCause Trainer::stop() {
  const StopCause cause = stop_.cause();
  for (const auto& observer : parts_.observers) observer->stopped(cause.signal);
  parts_.loader.abandon_reading();
  if (parts_.validator) parts_.validator->loader.abandon_reading();
  save_at_stop(str(signal_name(cause.signal), " on rank ", cause.rank, " stops the run "));
  return cause;
}

// Whether the state is saved is known when nothing is under way: a save may have failed, or was skipped for
// one that was. "is saved" is what a log is searched for, so it isn't said before it is so.
void Trainer::save_at_stop(const std::string& who_stops) {
  if (!is_loaded_)
    return log::info_rank0(who_stops + "before it began: nothing was loaded, and nothing was trained");
  const std::string what = str(who_stops, "behind step ", progress_.step);
  RunCheckpoints* checkpoints = parts_.checkpoints.get();
  const PhaseScope save = phase(Phase::Save);
  if (checkpoints) checkpoints->finish();
  if (progress_.step == started_at_) {
    log::info_rank0(what + ", which it began with: nothing was trained");
  } else if (!checkpoints || !checkpoints->is_due(progress_.step, /*is_last=*/true)) {
    log::warning_rank0(what + ": nothing is saved, as [checkpoint] says");
  } else if (checkpoints->is_saved(progress_.step)) {
    log::info_rank0(what + ", whose state is saved");
  } else {
    log::info_rank0(what + ": its state is being saved");
    check_replicas_if_due(/*saves=*/true);
    checkpoints->save_whole(progress_.step);
    log::info_rank0(str("the state behind step ", progress_.step, " is saved"));
  }
}

// Those that haven't heard of it yet will, but where it failed behind the verdict, on its rank alone.
void Trainer::fail_with_save() {
  const PhaseScope save = phase(Phase::Save);
  parts_.checkpoints->finish();
  throw Error("a checkpoint has failed on another rank, which says why");
}

bool Trainer::is_save_due(bool is_last) {
  if (!parts_.checkpoints) return false;
  parts_.checkpoints->check();
  return save_is_late_ || parts_.checkpoints->is_due(progress_.step, is_last) ||
         parts_.checkpoints->is_due_in_memory(progress_.step);
}

// What isn't finite isn't saved: the last step's numbers are read first. The rotation behind such a save
// would throw away the last one that steps went well behind.
void Trainer::save(bool is_last) {
  const PhaseScope save = phase(Phase::Save);
  if (launched_) read_launched();
  const bool to_disk = save_is_late_ || parts_.checkpoints->is_due(progress_.step, is_last);
  if (const int64_t skipped = progress_.nonfinite.in_a_row(); skipped > 0 && !is_last) {
    if (to_disk && !std::exchange(save_is_late_, true))
      log::warning_rank0(str("step ", progress_.step, " isn't saved: it is number ", skipped,
                             " in a row whose numbers aren't finite; the next one whose are is saved"));
    return;
  }
  save_is_late_ = false;
  if (!is_last && parts_.checkpoints->is_due_in_memory(progress_.step))
    parts_.checkpoints->save_in_memory(progress_.step);
  if (to_disk) parts_.checkpoints->save(progress_.step, is_last);
}

// A spike is known at its own step, also where the host reads a step behind: that is what the rule costs.
bool Trainer::rewind_if_spiked() {
  if (!progress_.spikes.on()) return false;
  if (launched_) read_launched();
  return std::exchange(spiked_, false) && rewind();
}

// The state is a checkpoint's again; the data go on behind the batch of the spike. That is saved behind the
// next step: a run that is killed and started again doesn't meet the same spike.
bool Trainer::rewind() {
  LossSpikes& spikes = progress_.spikes;
  const int64_t spike = progress_.step;
  const std::string what = str("step ", spike, ": the loss of ", spikes.last(), " is a spike above ",
                               spikes.mean(), " +- ", spikes.deviation());
  spikes.check_rewinds_left(what);
  const PhaseScope load = phase(Phase::Load);
  parts_.checkpoints->finish();
  if (!load_before_spike(spike, spikes.rewind_distance(spike))) {
    log::warning_rank0(what + "; there is no complete checkpoint to go back to, so the run goes on");
    return false;
  }
  spikes.count_rewind(spike);
  parts_.window.forget_tokens_seen();
  for (const auto& observer : parts_.observers) observer->begin_after(progress_.step);
  started_at_ = progress_.step;
  save_is_late_ = true;
  last_step_ = last_step();
  log::warning_rank0(str(what, ". The run goes back to step ", progress_.step,
                         " and on behind the batch of step ", spike, ": rewind ", spikes.num_rewinds(),
                         " of ", options_.fault_tolerance.max_rewinds));
  return true;
}

bool Trainer::load_before_spike(int64_t spike, int64_t distance) {
  for (; distance > 0; distance /= 2)
    if (spike > distance && parts_.checkpoints->load_before(spike - distance + 1, {"dataloader"}))
      return true;
  return false;
}

void Trainer::check_replicas_if_due(bool saves) {
  const int64_t freq = options_.fault_tolerance.check_replicas_freq;
  if (freq == 0 || !(saves || progress_.step % freq == 0)) return;
  const PhaseScope check = phase(Phase::CheckReplicas);
  check_replicas(parts_.world, parts_.parameters, progress_.step);
}

}  // namespace titan::train
