// StepNumbers: the host reads a step's loss and gradient norm at once, or a step later.

#include "train/step_runner.h"

#include <cmath>
#include <limits>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/where.h>

#include "dist/stream.h"
#include "titan/dist/collectives.h"
#include "titan/train/trainer.h"

namespace titan::train {

namespace {

constexpr dist::Label kFiniteLabel{"train::check_finite"};

// This rank's value for a max-reduction whose result identifies the lowest rank with a non-finite loss. 0:
// this rank's loss is finite.
double flag_of(const dist::World& world, bool not_finite) {
  return not_finite ? world.size() - world.rank() : 0;
}

int rank_from(const dist::World& world, double largest) {
  return largest == 0 ? -1 : world.size() - static_cast<int>(largest);
}

class ReadAtOnce final : public StepNumbers {
 public:
  ReadAtOnce(TrainerParts& parts, double max_norm) : parts_(parts), max_norm_(max_norm) {}

  ClippedStep clip(int64_t step, const at::Tensor& loss) override {
    values_ = {.step = step,
               .grad_norm = optim::clip_grad_norm(parts_.parameters, max_norm_, parts_.meshes.pp)};
    values_.local_loss = loss.item<double>();
    const double flag = flag_of(parts_.world, !std::isfinite(values_.local_loss));
    values_.loss_rank = rank_from(parts_.world, parts_.world.everyone()->max(flag, kFiniteLabel));
    return {};
  }
  void update_weights(const ClippedStep& /*clipped*/) override {
    if (values_.finite()) parts_.optimizer.step();
  }
  void send(int64_t /*step*/, const ClippedStep& /*clipped*/) override {}
  StepValues read() override { return values_; }
  bool are_late() const override { return false; }

 private:
  TrainerParts& parts_;
  double max_norm_;
  StepValues values_;
};

class ReadLate final : public StepNumbers {
 public:
  ReadLate(TrainerParts& parts, double max_norm) : parts_(parts), max_norm_(max_norm) {}

  ClippedStep clip(int64_t /*step*/, const at::Tensor& loss) override {
    const at::NoGradGuard no_grad;
    const dist::World& world = parts_.world;
    auto norm = optim::launch_grad_norm(parts_.parameters, max_norm_, parts_.device, parts_.meshes.pp);
    const at::Tensor flag =
        at::where(loss.isfinite(), flag_of(world, false), flag_of(world, true)).to(at::kDouble);
    if (world.size() > 1) world.everyone()->all_reduce(flag, dist::ReduceOp::Max, kFiniteLabel).wait();
    const at::Tensor skip = flag.gt(0).logical_or_(norm.norm.isfinite().logical_not_()).to(at::kFloat);
    return {loss.detach().to(at::kDouble), flag, skip, std::move(norm)};
  }
  void update_weights(const ClippedStep& clipped) override {
    parts_.optimizer.step_unless(clipped.skip, clipped.norm.factor);
  }
  void send(int64_t step, const ClippedStep& clipped) override {
    const at::NoGradGuard no_grad;
    queued_ = {};  // frees its memory for reuse
    const at::Tensor values = at::cat({clipped.loss.view({1}), clipped.flag.view({1}), clipped.norm.squares});
    const bool on_device = !values.is_cpu();
    queued_.host = at::empty(values.sizes(), values.options().device(at::kCPU).pinned_memory(on_device));
    queued_.host.copy_(values, /*non_blocking=*/on_device);
    queued_.copied = dist::Stream::current(values.device()).record();
    queued_.step = step;
    queued_.norm = clipped.norm;
  }
  StepValues read() override {
    queued_.copied.synchronize();
    const double* values = queued_.host.const_data_ptr<double>();
    return {.step = queued_.step,
            .local_loss = values[0],
            .loss_rank = rank_from(parts_.world, values[1]),
            .grad_norm = queued_.norm.read(values + 2)};
  }
  bool are_late() const override { return true; }

 private:
  // A copy from the device to the host.
  struct Queued {
    int64_t step = 0;
    optim::LaunchedGradNorm norm;
    at::Tensor host;  // [loss, flag, squares of ranks...], pinned if there is a GPU
    dist::Event copied;
  };

  TrainerParts& parts_;
  double max_norm_;
  Queued queued_;
};

}  // namespace

std::unique_ptr<StepNumbers> make_step_numbers(TrainerParts& parts, double max_norm, bool late) {
  if (late) return std::make_unique<ReadLate>(parts, max_norm);
  return std::make_unique<ReadAtOnce>(parts, max_norm);
}

StepValues no_values(int64_t step) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  return {.step = step, .local_loss = kNan, .grad_norm = {.norm = kNan}};
}

}  // namespace titan::train
