#include "titan/train/trainer.h"

#include <chrono>
#include <cmath>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/where.h>

#include "titan/checkpoint/hf_model.h"
#include "titan/checkpoint/model_file.h"
#include "titan/core/error.h"
#include "titan/core/file.h"
#include "titan/core/log.h"
#include "train/late_values.h"

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

StageParts whole_model(std::unique_ptr<TrainableModel> model, int64_t num_batches, int64_t rows,
                       bool validates) {
  StageParts parts{.step = {one_stage_schedule(static_cast<int>(num_batches)), {}}, .micro_batch_rows = rows};
  parts.stages = {{model.get(), 0}};
  parts.models.push_back(std::move(model));
  if (validates) parts.validation = ScheduleParts{one_stage_forward_schedule(1), {}};
  return parts;
}

Trainer::Trainer(TrainerParts parts, TrainerOptions options)
    : parts_(std::move(parts)),
      options_(std::move(options)),
      runner_(parts_.stages.stages, parts_.meshes.pp, parts_.device),
      step_plan_(runner_.plan(parts_.stages.step.schedule, parts_.stages.step.boundaries)) {
  if (const auto& validation = parts_.stages.validation)
    validation_plan_ = runner_.plan(validation->schedule, validation->boundaries);
  if (!options_.read_late)
    options_.read_late = parts_.device.is_cuda() && parts_.optimizer.can_skip_on_device();
}

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
  if (launched_) read_launched();
  save_final_model();
  parts_.logger->flush();
  log::info_rank0("training completed");
}

bool Trainer::train_step() {
  auto batches = fetch();
  if (!batches) return false;
  TokenCounts tokens = count_valid_tokens(*batches, parts_.meshes.batch);
  parts_.window.count_step(positions(*batches));
  StepValues values;
  values.step = step_;
  schedule_step();
  const bool logged = is_due(options_.log_freq);
  if (tokens.global > 0) {
    parts_.optimizer.zero_grad();
    const at::Tensor loss = forward_backward(*batches, tokens);
    if (*options_.read_late) {
      launch_update(loss);
      if (logged) values = read_launched();
    } else {
      values = update(loss);
    }
  } else {
    log::warning_rank0(str("step ", step_, ": no label of the global batch counts; the weights stay"));
  }
  if (logged) log_step(values, tokens);
  return true;
}

std::optional<std::vector<data::Batch>> Trainer::fetch() {
  const auto start = Clock::now();
  auto batches = parts_.loader.next_step();
  parts_.window.count_data_loading(seconds_since(start));
  return batches;
}

at::Tensor Trainer::forward_backward(const std::vector<data::Batch>& batches, const TokenCounts& tokens) {
  const at::Tensor loss =
      runner_.run(step_plan_, split_rows(batches, parts_.stages.micro_batch_rows), tokens.global);
  parts_.tied.sum();
  return loss;
}

// What a rank says of its loss, so that the largest of all is of the lowest rank whose loss isn't finite.
double Trainer::rank_if(bool not_finite) const {
  return not_finite ? parts_.world.size() - parts_.world.rank() : 0;
}

int Trainer::rank_from(double largest) const {
  return largest == 0 ? -1 : parts_.world.size() - static_cast<int>(largest);
}

StepValues Trainer::update(const at::Tensor& loss) {
  StepValues values;
  values.step = step_;
  values.grad_norm = optim::clip_grad_norm(parts_.parameters, options_.max_norm, parts_.meshes.pp);
  values.local_loss = loss.item<double>();
  values.loss_rank = rank_from(
      parts_.world.everyone()->max(rank_if(!std::isfinite(values.local_loss)), {"train::check_finite"}));
  check_finite(values);
  parts_.optimizer.step();
  return values;
}

// The last step is judged when this one's work is queued: the device doesn't run dry while the host waits.
void Trainer::launch_update(const at::Tensor& loss) {
  at::NoGradGuard no_grad;
  const auto clipped =
      optim::launch_clip_grad_norm(parts_.parameters, options_.max_norm, parts_.device, parts_.meshes.pp);
  const at::Tensor flag = at::where(loss.isfinite(), rank_if(false), rank_if(true)).to(at::kDouble);
  if (parts_.world.size() > 1)
    parts_.world.everyone()->all_reduce(flag, dist::ReduceOp::Max, {"train::check_finite"}).wait();
  const at::Tensor skip = flag.gt(0).logical_or_(clipped.norm.isfinite().logical_not_()).to(at::kFloat);
  if (launched_) read_launched();
  parts_.optimizer.step_unless(skip);
  launched_ = std::make_unique<LateValues>(step_, loss, flag, clipped);
}

StepValues Trainer::read_launched() {
  StepValues values = launched_->read();
  values.loss_rank = rank_from(launched_->loss_flag());
  launched_.reset();
  check_finite(values);
  return values;
}

// All ranks come to the same verdict, as the norm is the same everywhere and the loss's flag is exchanged.
// The losses are judged first: they know their rank. One rank's NaN is in every shard of the reduced
// gradients, so the norm can only name where it was seen, and says so.
void Trainer::check_finite(const StepValues& values) const {
  const bool mine = values.loss_rank == parts_.world.rank();
  TITAN_CHECK(values.loss_rank < 0, "step ", values.step, ": the loss isn't finite on rank ",
              values.loss_rank, mine ? str(" (", values.local_loss, ")") : "",
              ". The optimizer step was not taken.");
  TITAN_CHECK(values.grad_norm.finite(), "step ", values.step,
              ": the gradient norm isn't finite, though the losses of all ranks are; first seen in the shard "
              "of rank ",
              values.grad_norm.nonfinite_rank, ". The optimizer step was not taken.");
}

// A pure function of the step, set before it is used: the learning rate of step k is factor(k - 1).
void Trainer::schedule_step() { parts_.optimizer.set_lr_factor(parts_.schedule.factor(step_ - 1)); }

void Trainer::log_step(const StepValues& values, const TokenCounts& tokens) {
  const auto group = parts_.meshes.loss.group();
  StepMetrics metrics;
  metrics.step = step_;
  metrics.loss = group->sum(values.local_loss, {"metrics::loss"});
  // Of the rows that this rank shares with its context-parallel peers, each of which has a part of the sum.
  const double rows_loss = parts_.meshes.cp.group()->sum(values.local_loss, {"metrics::rows_loss"});
  const double local_mean =
      tokens.local > 0 ? rows_loss * static_cast<double>(tokens.global) / static_cast<double>(tokens.local)
                       : 0;
  metrics.max_loss = group->max(local_mean, {"metrics::max_loss"});
  metrics.grad_norm = values.grad_norm.norm;
  metrics.lr = parts_.optimizer.lr();
  parts_.window.close(metrics);
  metrics.n_tokens_seen = parts_.meshes.batch.group()->sum(metrics.n_tokens_seen, {"metrics::tokens"});
  parts_.logger->log(metrics);
}

void Trainer::validate_if_due() {
  if (!parts_.validator || !is_due(parts_.validator->settings.freq)) return;
  if (launched_) read_launched();
  const auto start = Clock::now();
  data::DataLoader& loader = parts_.validator->loader;
  loader.restart();
  ValidationResult result = validate(runner_, *validation_plan_, parts_.meshes,
                                     {.next = [&] { return loader.next(); }, .run_dry = !loader.num_steps()},
                                     parts_.validator->settings.steps);
  ValidationMetrics metrics{.step = step_, .loss = result.loss};
  metrics.tps = parts_.window.rate_of(result.local_tokens, result.seconds);
  parts_.window.fill_memory(metrics.memory_gib, metrics.memory_percent);
  parts_.logger->log(metrics);
  parts_.window.leave_out(seconds_since(start));
}

void Trainer::save_final_model() {
  if (options_.final_model.empty()) return;
  if (parts_.world.rank() == 0) make_folder(options_.final_model.parent_path());
  if (options_.final_hf) {
    save_hf_model(parts_.parameters, *options_.final_hf, options_.final_model, {.assets = options_.hf_assets},
                  options_.final_model_dtype, parts_.meshes.pp);
  } else {
    save_model(parts_.parameters, options_.final_model, options_.final_model_dtype, parts_.meshes.pp);
  }
  log::info_rank0(str("the model is in ", options_.final_model.string()));
}

}  // namespace titan::train
