#include "titan/train/trainer.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <utility>

#include "core/elapsed.h"
#include "titan/core/error.h"
#include "titan/core/log.h"
#include "train/policies/late_values.h"
#include "train/trainer_state.h"

namespace titan::train {

namespace {

using Clock = std::chrono::steady_clock;

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
      step_plan_(runner_.plan(parts_.stages.step.schedule, parts_.stages.step.boundaries)),
      stop_(parts_.world, parts_.meshes),
      progress_{.nonfinite = NonFiniteSteps(options_.fault_tolerance),
                .spikes = LossSpikes(options_.fault_tolerance)} {
  if (const auto& validation = parts_.stages.validation)
    validation_plan_ = runner_.plan(validation->schedule, validation->boundaries);
  if (!options_.read_late)
    options_.read_late = parts_.device.is_cuda() && parts_.optimizer.can_skip_on_device();
  TITAN_CHECK(!progress_.spikes.on() || parts_.checkpoints,
              "fault_tolerance.spike_sigma: without checkpoints there is nothing to go back to");
  if (parts_.checkpoints) saved_ = add_trainer_state(parts_, progress_, options_);
}

Trainer::~Trainer() = default;

RunEnd Trainer::train() {
  if (options_.seed_checkpoint) {
    save_seed();
    return {};
  }
  if (start()) run_steps();
  return finish();
}

void Trainer::run_steps() {
  const int64_t first = progress_.step + 1;
  last_step_ = last_step();
  while (progress_.step < last_step_ && !stop_.agreed()) {
    ++progress_.step;
    const PhaseScope step = phase(Phase::Step);
    if (!train_step()) {
      --progress_.step;
      break;
    }
    const bool is_first = progress_.step == first;
    if (!rewind_if_spiked()) end_step();
    // Only the first step pays for lazy set-up; whoever is late after it is lost.
    if (is_first) parts_.world.set_timeout(std::chrono::seconds(options_.train_timeout_s));
  }
  if (progress_.step < options_.steps && !stop_.agreed())
    log::warning_rank0(str("the data ends after step ", progress_.step, " of ", options_.steps));
}

// In this order: what replicas disagree about isn't saved (all would load the one copy that is, and agree for
// ever), and a run that is killed in between goes on behind the step before, and validates again.
void Trainer::end_step() {
  const bool is_last = progress_.step == last_step_;
  const bool saves = is_save_due(is_last);
  check_replicas_if_due(saves);
  validate_if_due();
  if (saves) save(is_last);
}

RunEnd Trainer::finish() {
  const PhaseScope finish = phase(Phase::Finish);
  if (launched_) read_launched();
  RunEnd end{.step = progress_.step};
  if (stop_.agreed()) end.stop = stop();
  if (parts_.checkpoints) parts_.checkpoints->end();
  parts_.logger->flush();
  log::info_rank0(!stop_.agreed() ? "training completed"
                  : is_loaded_    ? str("training stopped behind step ", end.step, " of ", options_.steps)
                                  : "training stopped before it began");
  return end;
}

bool Trainer::load() {
  const PhaseScope load = phase(Phase::Load);
  return parts_.checkpoints && parts_.checkpoints->load();
}

// A signal before the first step has nothing to save, but what is in memory alone: the job's end takes that.
bool Trainer::start() {
  const bool may_be_lost = parts_.checkpoints && parts_.checkpoints->keeps_in_memory();
  if (!may_be_lost && stop_.agree()) return false;
  const bool goes_on = load();
  is_loaded_ = true;
  // What is in memory alone a stop has yet to save.
  started_at_ = goes_on && parts_.checkpoints->went_on_from_memory() ? -1 : progress_.step;
  if (stop_.agree()) return false;
  if (has_ended()) return false;
  if (options_.on_start) options_.on_start();
  parts_.logger->begin_behind(goes_on ? progress_.step : 0);
  if (progress_.step == 0) {
    log::info_rank0(str("training starts: ", options_.steps, " steps"));
  } else {
    log::info_rank0(str("training goes on: ", std::max<int64_t>(0, options_.steps - progress_.step), " of ",
                        options_.steps, " steps are left"));
  }
  parts_.window.start();
  return true;
}

void Trainer::save_seed() {
  const PhaseScope finish = phase(Phase::Finish);
  if (options_.on_start) options_.on_start();
  const PhaseScope save = phase(Phase::Save);
  parts_.checkpoints->save_seed();
}

// Data that ends makes an earlier one the last, which then is saved as such.
int64_t Trainer::last_step() const {
  const auto end = parts_.loader.num_steps();
  if (!end) return options_.steps;
  return std::min(options_.steps, progress_.step + std::max<int64_t>(0, *end - parts_.loader.state().steps));
}

// Whose data ended before the last step that was asked for. What it left, the model alone, isn't written
// twice, nor are the steps to it trained again.
bool Trainer::has_ended() const {
  const int64_t last = last_step();
  if (!parts_.checkpoints || last == options_.steps || last <= progress_.step) return false;
  if (!parts_.checkpoints->has_model_alone(last)) return false;
  log::info_rank0(str("this run has come to its end: the data end after step ", last, " of ", options_.steps,
                      ", and the model of that step is there"));
  return true;
}

bool Trainer::train_step() {
  auto batches = fetch();
  if (!batches) return false;
  if (parts_.checkpoints) parts_.checkpoints->check();
  const TokenCounts tokens =
      stop_.count(*batches, /*fails=*/parts_.checkpoints && parts_.checkpoints->failed());
  if (stop_.any_fails()) fail_with_save();
  if (stop_.agreed()) {
    if (!batches->empty()) parts_.loader.take_back_step();
    return false;
  }
  // Not of the rows that only fill up where ranks share them unevenly.
  parts_.window.count_step(parts_.loader.num_rows() * batches->front().labels_BS.size(1));
  StepValues values;
  values.step = progress_.step;
  schedule_step();
  const bool logged = is_due(options_.log_freq);
  if (tokens.global > 0) {
    parts_.optimizer.zero_grad();
    const StepInput input{std::move(*batches), tokens};
    const at::Tensor loss = forward_backward(input);
    if (*options_.read_late) {
      launch_update(loss, input);
      if (logged) values = read_launched();
    } else {
      values = update(loss, input);
    }
  } else {
    values.local_loss = values.grad_norm.norm = std::numeric_limits<double>::quiet_NaN();  // there are none
    log::warning_rank0(
        str("step ", progress_.step, ": no label of the global batch counts; the weights stay"));
  }
  if (logged) log_step(values, tokens);
  return true;
}

// Of a rank that gives up waiting: no batches, which only an agreement to stop can follow.
std::optional<std::vector<data::Batch>> Trainer::fetch() {
  const PhaseScope data = phase(Phase::Data);
  const auto start = Clock::now();
  auto batches = stop_.wait_for(parts_.loader) ? parts_.loader.next_step() : std::vector<data::Batch>();
  parts_.window.count_data_loading(seconds_since(start));
  return batches;
}

std::optional<data::Batch> Trainer::fetch_validation() {
  data::DataLoader& loader = parts_.validator->loader;
  return stop_.wait_for(loader) ? loader.next() : data::Batch();
}

at::Tensor Trainer::forward_backward(const StepInput& input) {
  const PhaseScope forward_backward = phase(Phase::ForwardBackward);
  const at::Tensor loss =
      runner_.run(step_plan_, split_rows(input.batches, parts_.stages.micro_batch_rows), input.tokens.global);
  parts_.tied.sum();
  return loss;
}

// A pure function of the schedule's step, set before it is used: the learning rate of step k is factor(k -
// 1).
void Trainer::schedule_step() {
  parts_.optimizer.set_lr_factor(parts_.schedule.factor(progress_.schedule_steps++));
}

void Trainer::log_step(const StepValues& values, const TokenCounts& tokens) {
  const PhaseScope log = phase(Phase::Log);
  const auto group = parts_.meshes.loss.group();
  StepMetrics metrics;
  metrics.step = progress_.step;
  metrics.loss = group->sum(values.local_loss, {"metrics::loss"});
  // Of the rows that this rank shares with its context-parallel peers, each of which has a part of the sum.
  const double rows_loss = parts_.meshes.rows.group()->sum(values.local_loss, {"metrics::rows_loss"});
  const double local_mean =
      tokens.local > 0 ? rows_loss * static_cast<double>(tokens.global) / static_cast<double>(tokens.local)
                       : 0;
  metrics.max_loss = group->max(local_mean, {"metrics::max_loss"});
  if (tokens.global == 0) metrics.max_loss = metrics.loss;  // none, too
  metrics.grad_norm = values.grad_norm.norm;
  metrics.local_valid_tokens = tokens.local;
  metrics.global_valid_tokens = tokens.global;
  metrics.lr = parts_.optimizer.lr();
  if (progress_.nonfinite.skips()) metrics.skipped_steps = progress_.nonfinite.total();
  if (parts_.checkpoints) {
    metrics.checkpoint_s = parts_.checkpoints->take_blocked_seconds();
    parts_.window.leave_out(*metrics.checkpoint_s);
  }
  parts_.window.close(metrics);
  metrics.n_tokens_seen =
      progress_.tokens_before + parts_.meshes.batch.group()->sum(metrics.n_tokens_seen, {"metrics::tokens"});
  parts_.logger->log(metrics);
  for (const auto& observer : parts_.observers) observer->logged(metrics);
}

void Trainer::validate_if_due() {
  if (!parts_.validator || !is_due(parts_.validator->settings.freq)) return;
  const PhaseScope validation = phase(Phase::Validate);
  if (launched_) read_launched();
  const auto start = Clock::now();
  data::DataLoader& loader = parts_.validator->loader;
  const int64_t steps = parts_.validator->settings.steps;
  loader.restart();
  ValidationResult result = validate(runner_, *validation_plan_, parts_.meshes,
                                     {.next = [&] { return fetch_validation(); },
                                      .run_dry = !loader.num_steps(),
                                      .micro_batches = loader.num_micro_batches(),
                                      .stop = &stop_},
                                     steps < 0 ? -1 : steps * loader.num_micro_batches());
  if (result.stopped) return;
  ValidationMetrics metrics{.step = progress_.step, .loss = result.loss};
  metrics.tps = parts_.window.rate_of(result.local_tokens, result.seconds);
  parts_.window.fill_memory(metrics.memory_gib, metrics.memory_percent);
  parts_.logger->log(metrics);
  parts_.window.leave_out(seconds_since(start));
}

}  // namespace titan::train
