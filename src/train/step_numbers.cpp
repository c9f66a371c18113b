// StepNumbers: the host reads a step's loss and gradient norm at once, or a step later.

#include "train/step_runner.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/where.h>

#include "dist/stream.h"
#include "titan/dist/collectives.h"
#include "titan/train/trainer.h"

namespace titan::train {

namespace {

constexpr dist::Label kFiniteLabel{"train::check_finite"}, kLossesLabel{"train::losses"};

// This rank's value for a max-reduction whose result identifies the lowest rank with a non-finite loss. 0:
// this rank's loss is finite.
double flag_of(const dist::World& world, bool not_finite) {
  return not_finite ? world.size() - world.rank() : 0;
}

int rank_from(const dist::World& world, double largest) {
  return largest == 0 ? -1 : world.size() - static_cast<int>(largest);
}

// All ranks' losses, on the device of `loss`.
at::Tensor gathered(const dist::World& world, const at::Tensor& loss) {
  const at::Tensor mine = loss.view({1});
  if (world.size() == 1) return mine;
  at::Tensor all = at::empty({world.size()}, mine.options());
  world.everyone()->all_gather(all, mine, kLossesLabel).wait();
  return all;
}

class ReadAtOnce final : public StepNumbers {
 public:
  ReadAtOnce(TrainerParts& parts, double max_norm) : parts_(parts), max_norm_(max_norm) {}

  // The losses say which of them isn't finite.
  ClippedStep clip(const at::Tensor& loss) override {
    const dist::World& world = parts_.world;
    values_ = {.step = step_,
               .grad_norm = optim::clip_grad_norm(parts_.parameters, max_norm_, parts_.meshes.pp)};
    values_.local_loss = loss.item<double>();
    double flag = flag_of(world, !std::isfinite(values_.local_loss));
    if (has_losses_) {
      const at::Tensor losses = gathered(world, at::scalar_tensor(values_.local_loss, at::kDouble));
      values_.losses.assign(losses.const_data_ptr<double>(),
                            losses.const_data_ptr<double>() + losses.numel());
      const auto first = std::ranges::find_if_not(values_.losses, [](double l) { return std::isfinite(l); });
      flag = static_cast<double>(values_.losses.end() - first);
    } else {
      flag = world.everyone()->max(flag, kFiniteLabel);
    }
    values_.loss_rank = rank_from(world, flag);
    return {};
  }
  void update_weights(const ClippedStep& /*clipped*/) override {
    if (values_.finite()) parts_.optimizer.step();
  }
  void send(const ClippedStep& /*clipped*/) override {}
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

  ClippedStep clip(const at::Tensor& loss) override {
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
  // The losses aren't gathered in clip(), because a graph is the same in all steps.
  void send(const ClippedStep& clipped) override {
    const at::NoGradGuard no_grad;
    queued_ = {};  // frees its memory for reuse
    std::vector<at::Tensor> parts{clipped.loss.view({1}), clipped.flag.view({1}), clipped.norm.squares};
    if (has_losses_) parts.push_back(gathered(parts_.world, clipped.loss));
    const at::Tensor values = at::cat(parts);
    const bool on_device = !values.is_cpu();
    queued_.host = at::empty(values.sizes(), values.options().device(at::kCPU).pinned_memory(on_device));
    queued_.host.copy_(values, /*non_blocking=*/on_device);
    queued_.copied = dist::Stream::current(values.device()).record();
    queued_.step = step_;
    queued_.norm = clipped.norm;
  }
  StepValues read() override {
    queued_.copied.synchronize();
    const double* values = queued_.host.const_data_ptr<double>();
    const double* const losses = values + 2 + queued_.norm.squares.numel();
    return {.step = queued_.step,
            .local_loss = values[0],
            .losses = {losses, values + queued_.host.numel()},
            .loss_rank = rank_from(parts_.world, values[1]),
            .grad_norm = queued_.norm.read(values + 2)};
  }
  bool are_late() const override { return true; }

 private:
  // A copy from the device to the host.
  struct Queued {
    int64_t step = 0;
    optim::LaunchedGradNorm norm;
    at::Tensor
        host;  // [loss, flag, squares of ranks..., losses of ranks... if it has them], pinned if there is a GPU
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

StepValues no_values(int64_t step, int world_size) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  return {.step = step,
          .local_loss = kNan,
          .losses = std::vector(static_cast<size_t>(world_size), kNan),
          .grad_norm = {.norm = kNan}};
}

}  // namespace titan::train
