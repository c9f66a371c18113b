// Trainer: a step's update, and what is made of its numbers.

#include <cmath>
#include <exception>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/where.h>

#include "titan/core/error.h"
#include "titan/core/log.h"
#include "titan/train/trainer.h"
#include "train/policies/late_values.h"
#include "train/step_replay.h"

namespace titan::train {

// What a rank says of its loss, so that the largest of all is of the lowest rank whose loss isn't finite.
double Trainer::rank_if(bool not_finite) const {
  return not_finite ? parts_.world.size() - parts_.world.rank() : 0;
}

int Trainer::rank_from(double largest) const {
  return largest == 0 ? -1 : parts_.world.size() - static_cast<int>(largest);
}

StepValues Trainer::update(const at::Tensor& loss, const StepInput& input) {
  const PhaseScope optimizer = phase(Phase::Optimizer);
  StepValues values;
  values.step = progress_.step;
  values.grad_norm = optim::clip_grad_norm(parts_.parameters, options_.max_norm, parts_.meshes.pp);
  values.local_loss = loss.item<double>();
  values.loss_rank = rank_from(
      parts_.world.everyone()->max(rank_if(!std::isfinite(values.local_loss)), {"train::check_finite"}));
  // A step that is skipped counts, as on a device, where it isn't known yet that it will be.
  let_state_change();
  judge(values, input);
  if (!values.finite()) return values;
  parts_.optimizer.step();
  return values;
}

// The last step is judged when this one's work is queued: the device doesn't run dry while the host waits.
void Trainer::launch_update(const at::Tensor& loss, const StepInput& input) {
  const PhaseScope optimizer = phase(Phase::Optimizer);
  at::NoGradGuard no_grad;
  const auto clipped =
      optim::launch_clip_grad_norm(parts_.parameters, options_.max_norm, parts_.device, parts_.meshes.pp);
  const at::Tensor flag = at::where(loss.isfinite(), rank_if(false), rank_if(true)).to(at::kDouble);
  if (parts_.world.size() > 1)
    parts_.world.everyone()->all_reduce(flag, dist::ReduceOp::Max, {"train::check_finite"}).wait();
  const at::Tensor skip = flag.gt(0).logical_or_(clipped.norm.isfinite().logical_not_()).to(at::kFloat);
  if (launched_) read_launched();
  let_state_change();
  parts_.optimizer.step_unless(skip);
  launched_ = std::make_unique<LateValues>(progress_.step, loss, flag, clipped);
  launched_input_ = input;
}

StepValues Trainer::read_launched() {
  StepValues values = launched_->read();
  values.loss_rank = rank_from(launched_->loss_flag());
  launched_.reset();
  judge(values, std::exchange(launched_input_, {}));
  return values;
}

// All ranks come to the same verdict, as the norm is the same everywhere and the loss's flag is exchanged.
void Trainer::judge(const StepValues& values, const StepInput& input) {
  if (!values.finite())
    return progress_.nonfinite.add(nonfinite_number(values), [&] { return replay(values, input); });
  progress_.nonfinite.add_finite();
  if (progress_.spikes.on()) spiked_ = progress_.spikes.add(loss_of_all(values));
}

// The losses come first: they know their rank. One rank's NaN is in every shard of the reduced gradients, so
// the norm can only name where it was seen, and says so.
std::string Trainer::nonfinite_number(const StepValues& values) const {
  if (values.loss_rank < 0)
    return str(
        "step ", values.step,
        ": the gradient norm isn't finite, though the losses of all ranks are; first seen in the shard "
        "of rank ",
        values.grad_norm.nonfinite_rank);
  const bool mine = values.loss_rank == parts_.world.rank();
  return str("step ", values.step, ": the loss isn't finite on rank ", values.loss_rank,
             mine ? str(" (", values.local_loss, ")") : "");
}

// The weights are still those of that step, also where the host reads a step late: it was skipped on the
// device. What is known already is told first, should this not come to its end.
std::string Trainer::replay(const StepValues& values, const StepInput& input) {
  log::warning_rank0(nonfinite_number(values) +
                     ". The step is run again to find the module and the rank that it comes from");
  const at::AutoGradMode with_gradients(true);  // where it is read late they are off
  try {
    return replay_step(parts_.world, parts_.meshes, runner_.stages(), parts_.parameters, values.step, [&] {
      parts_.optimizer.zero_grad();
      return forward_backward(input);
    });
  } catch (const std::exception& error) {
    return "Run again to find where it comes from, the step failed: " + reason_of(error);
  }
}

// Of the whole batch, the same bits on all ranks: those of a tensor-parallel group have the same loss each.
double Trainer::loss_of_all(const StepValues& values) const {
  return parts_.world.everyone()->sum(values.local_loss, {"train::loss_spikes"}) / parts_.meshes.tp.size();
}

// A save may still be reading what the optimizer is about to write.
void Trainer::let_state_change() {
  if (parts_.checkpoints) parts_.checkpoints->wait_for_staging();
  if (parts_.before_optimizer) parts_.before_optimizer();
}

}  // namespace titan::train
