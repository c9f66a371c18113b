#include "titan/train/trainer.h"

#include <chrono>
#include <cmath>

#include "titan/checkpoint/model_file.h"
#include "titan/core/error.h"
#include "titan/core/file.h"
#include "titan/core/log.h"

namespace titan::train {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

int64_t positions(const std::vector<data::Batch>& batches) {
  int64_t count = 0;
  for (const data::Batch& batch : batches) count += batch.labels_BS.numel();
  return count;
}

}  // namespace

Trainer::Trainer(TrainerParts parts, TrainerOptions options)
    : parts_(std::move(parts)),
      options_(std::move(options)),
      runner_(*parts_.model, parts_.device),
      step_schedule_(one_stage_schedule(static_cast<int>(parts_.loader.num_micro_batches()))) {}

Trainer::~Trainer() = default;

void Trainer::train() {
  log::info_rank0(str("training starts: ", options_.steps, " steps"));
  parts_.window.start();
  while (step_ < options_.steps) {
    ++step_;
    if (!train_step()) {
      --step_;
      log::warning_rank0(str("the data ends after step ", step_, " of ", options_.steps));
      break;
    }
    validate_if_due();
    // Only the first step pays for lazy set-up; whoever is late after it is lost.
    if (step_ == 1) parts_.world.set_timeout(std::chrono::seconds(options_.train_timeout_s));
  }
  save_final_model();
  parts_.logger->flush();
  log::info_rank0("training completed");
}

bool Trainer::train_step() {
  auto batches = fetch();
  if (!batches) return false;
  TokenCounts tokens = count_valid_tokens(*batches, parts_.meshes.loss);
  parts_.window.count_step(positions(*batches));
  double local_loss = 0;
  optim::GradNorm grad_norm;
  schedule_step();
  if (tokens.global > 0) {
    parts_.optimizer.zero_grad();
    at::Tensor loss = forward_backward(*batches, tokens);
    grad_norm = clip();
    local_loss = loss.item<double>();
    check_finite(local_loss, grad_norm);
    optimizer_step();
  } else {
    log::warning_rank0(str("step ", step_, ": no label of the global batch counts; the weights stay"));
  }
  if (is_due(options_.log_freq)) log_step(local_loss, grad_norm, tokens);
  return true;
}

std::optional<std::vector<data::Batch>> Trainer::fetch() {
  const auto start = Clock::now();
  auto batches = parts_.loader.next_step();
  parts_.window.count_data_loading(seconds_since(start));
  return batches;
}

at::Tensor Trainer::forward_backward(const std::vector<data::Batch>& batches, const TokenCounts& tokens) {
  return runner_.run(step_schedule_, batches, tokens.global);
}

optim::GradNorm Trainer::clip() { return optim::clip_grad_norm(parts_.parameters, options_.max_norm); }

// All ranks come to the same verdict, as the norm is the same everywhere and the loss's flag is exchanged.
// The losses are judged first: they know their rank. One rank's NaN is in every shard of the reduced
// gradients, so the norm can only name where it was seen, and says so.
void Trainer::check_finite(double local_loss, const optim::GradNorm& grad_norm) {
  const int world_size = parts_.world.size();
  const double flag = std::isfinite(local_loss) ? 0 : world_size - parts_.world.rank();
  const double worst = parts_.world.everyone()->max(flag, {"train::check_finite"});
  TITAN_CHECK(worst == 0, "step ", step_, ": the loss isn't finite on rank ",
              world_size - static_cast<int>(worst), worst == flag ? str(" (", local_loss, ")") : "",
              ". The optimizer step was not taken.");
  TITAN_CHECK(grad_norm.finite(), "step ", step_,
              ": the gradient norm isn't finite, though the losses of all ranks are; first seen in the shard "
              "of rank ",
              grad_norm.nonfinite_rank, ". The optimizer step was not taken.");
}

void Trainer::optimizer_step() { parts_.optimizer.step(); }

// A pure function of the step, set before it is used: the learning rate of step k is factor(k - 1).
void Trainer::schedule_step() { parts_.optimizer.set_lr_factor(parts_.schedule.factor(step_ - 1)); }

void Trainer::log_step(double local_loss, const optim::GradNorm& grad_norm, const TokenCounts& tokens) {
  auto group = parts_.meshes.loss.group();
  StepMetrics metrics;
  metrics.step = step_;
  metrics.loss = group->sum(local_loss, {"metrics::loss"});
  const double local_mean =
      tokens.local > 0 ? local_loss * static_cast<double>(tokens.global) / static_cast<double>(tokens.local)
                       : 0;
  metrics.max_loss = group->max(local_mean, {"metrics::max_loss"});
  metrics.grad_norm = grad_norm.norm;
  metrics.lr = parts_.optimizer.lr();
  parts_.window.close(metrics);
  metrics.n_tokens_seen = group->sum(metrics.n_tokens_seen, {"metrics::tokens"});
  parts_.logger->log(metrics);
}

void Trainer::validate_if_due() {
  if (!parts_.validator || !is_due(parts_.validator->settings.freq)) return;
  const auto start = Clock::now();
  data::DataLoader& loader = parts_.validator->loader;
  loader.restart();
  ValidationResult result = validate(*parts_.model, parts_.device, parts_.meshes.loss,
                                     {.next = [&] { return loader.next(); }, .run_dry = !loader.num_steps()},
                                     parts_.validator->settings.steps);
  ValidationMetrics metrics{.step = step_, .loss = result.loss};
  metrics.tps = static_cast<double>(result.local_tokens) / result.seconds;
  parts_.window.fill_memory(metrics.memory_gib, metrics.memory_percent);
  parts_.logger->log(metrics);
  parts_.window.leave_out(seconds_since(start));
}

void Trainer::save_final_model() {
  if (options_.final_model.empty()) return;
  if (parts_.world.rank() == 0) make_folder(options_.final_model.parent_path());
  save_model(parts_.parameters, options_.final_model, options_.final_model_dtype);
  log::info_rank0(str("the model is in ", options_.final_model.string()));
}

}  // namespace titan::train
