#include "titan/train/trainer.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <numeric>
#include <utility>

#include "core/units.h"
#include "titan/core/error.h"
#include "titan/core/log.h"
#include "train/checkpoints/run_checkpoints.h"
#include "train/step_graphs.h"
#include "train/step_runner.h"

namespace titan::train {

Trainer::Trainer(TrainerParts parts, TrainerOptions options)
    : parts_(std::move(parts)), options_(std::move(options)) {
  const bool late =
      options_.read_late.value_or(parts_.device.is_cuda() && parts_.optimizer.can_skip_on_device());
  numbers_ = make_step_numbers(parts_, options_.max_norm, late);
  if (options_.record_steps) {
    TITAN_CHECK(late, "steps can be recorded only on a GPU, with numbers that are read late");
    graphs_ = std::make_unique<StepGraphs>(parts_, *numbers_);
  }
  for (const std::string& name : trainer_policies().names())
    if (auto policy = trainer_policies().get(name)(parts_))
      parts_.policies.push_back({name, std::move(policy)});
  if (parts_.checkpoints) add_saved_state();
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

// A stop before the first step has nothing to save, unless the newest state is only in memory. Such a state
// is loaded first, so that the stop can save it.
bool Trainer::start() {
  const bool may_be_lost = parts_.checkpoints && parts_.checkpoints->keeps_in_memory();
  if (!may_be_lost && !agree({})) return false;
  const bool resumes = load();
  is_loaded_ = true;
  started_at_ = resumes && parts_.checkpoints->resumed_from_memory() ? -1 : progress_.step;
  if (!agree({}) || has_ended()) return false;
  if (options_.on_start) options_.on_start();
  for (const auto& observer : parts_.observers) observer->begin_after(resumes ? progress_.step : 0);
  const int64_t left = std::max<int64_t>(0, options_.steps - progress_.step);
  log::info_rank0(progress_.step == 0
                      ? str("training starts: ", options_.steps, " steps")
                      : str("training continues: ", left, " of ", options_.steps, " steps are left"));
  parts_.window.start();
  return true;
}

void Trainer::run_steps() {
  const int64_t first = progress_.step + 1;
  last_step_ = last_step();
  while (progress_.step < last_step_ && !stopping_) {
    ++progress_.step;
    const PhaseScope step = phase(Phase::Step);
    const bool is_first = progress_.step == first;
    if (!train_step()) {
      --progress_.step;
      break;
    }
    end_step();
    // Only the first step may take long, to set things up; a rank that is late afterwards is lost.
    if (!is_first) continue;
    settle();
    parts_.world.set_timeout(std::chrono::seconds(options_.train_timeout_s));
  }
  if (progress_.step < options_.steps && !stopping_)
    log::warning_rank0(str("the data ends after step ", progress_.step, " of ", options_.steps));
}

// False: there is no step to make, because the data ends or all ranks stop.
bool Trainer::train_step() {
  auto input = fetch();
  if (!input) return false;
  const TokenCounts tokens = input->tokens;
  const int64_t local_tokens = tokens_in(input->batches);
  schedule_step();
  bool has_losses = is_due(options_.log_freq);
  for (const auto& [name, policy] : parts_.policies) has_losses = has_losses || policy->reads_loss();
  numbers_->begin(progress_.step, has_losses);
  if (tokens.global > 0) {
    parts_.optimizer.zero_grad();
    ClippedStep clipped;
    at::Tensor loss;
    if (graphs_)
      clipped = run_graph(*input);
    else
      loss = forward_backward(*input);
    const PhaseScope optimizer = phase(Phase::Optimizer);
    if (!graphs_) clipped = numbers_->clip(loss);
    update(*std::move(input), clipped);
  } else {
    log::warning_rank0(
        str("step ", progress_.step, ": the global batch has no valid labels; weights unchanged"));
    settle();
    values_ = no_values(progress_.step, parts_.world.size());
  }
  log_step();  // the step before: by now its numbers have been read
  parts_.window.count_step(local_tokens);
  if (is_due(options_.log_freq)) {
    StepMetrics& metrics = unlogged_.emplace(StepMetrics(), tokens).metrics;
    metrics.step = progress_.step;
    metrics.local_valid_tokens = tokens.local;
    metrics.global_valid_tokens = tokens.global;
    metrics.lr = parts_.optimizer.lr();
  }
  if (!unread_) log_step();
  return true;
}

std::optional<StepInput> Trainer::fetch() {
  auto batches = next_batches();
  if (!batches) return std::nullopt;
  std::optional<int64_t> seen;
  if (is_due(options_.log_freq)) seen = parts_.window.local_tokens_seen() + tokens_in(*batches);
  const auto agreed =
      go_on(*batches, {.drops_graph = graphs_ && !graphs_->can_launch(*batches), .tokens_seen = seen});
  if (!agreed) {
    if (!batches->empty()) parts_.loader.take_back_step();
    return std::nullopt;
  }
  if (agreed->drops_graph) graphs_->drop(progress_.step);
  return StepInput{*std::move(batches), agreed->tokens};
}

// A rank that gives up waiting returns no batches. All ranks then agree to stop.
std::optional<std::vector<data::Batch>> Trainer::next_batches() {
  const PhaseScope data = phase(Phase::Data);
  const auto start = std::chrono::steady_clock::now();
  auto batches = wait_for(parts_.loader) ? parts_.loader.next_step() : std::vector<data::Batch>();
  parts_.window.count_data_loading(seconds_since(start));
  return batches;
}

bool Trainer::wait_for(data::DataLoader& loader) {
  constexpr std::chrono::milliseconds kPause{100};
  while (!loader.wait(kPause))
    for (const auto& [name, policy] : parts_.policies)
      if (policy->gives_up_waiting()) return false;
  return true;
}

// Padding rows, which fill up batches if rows don't divide evenly over ranks, aren't counted.
int64_t Trainer::tokens_in(const std::vector<data::Batch>& batches) const {
  return batches.empty() ? 0 : parts_.loader.num_rows() * batches.front().labels_BS.size(1);
}

std::optional<TokenCounts> Trainer::agree(const std::vector<data::Batch>& batches) {
  const auto agreed = go_on(batches, {});
  return agreed ? std::optional(agreed->tokens) : std::nullopt;
}

std::optional<Agreement> Trainer::go_on(const std::vector<data::Batch>& batches, Ballot mine) {
  if (parts_.checkpoints) parts_.checkpoints->check();
  for (const auto& [name, policy] : parts_.policies) mine.vote = std::max(mine.vote, policy->vote());
  if (parts_.checkpoints && parts_.checkpoints->failed()) mine.vote = Vote::Fail;
  Agreement agreed = exchange(batches, std::move(mine));
  if (agreed.vote == Vote::Fail) fail_with_save();
  stopping_ = stopping_ || agreed.vote == Vote::Stop;
  return stopping_ ? std::nullopt : std::optional(std::move(agreed));
}

// The figures of a rank's observers follow one another.
Agreement Trainer::exchange(const std::vector<data::Batch>& batches, Ballot mine) {
  for (const auto& observer : parts_.observers) {
    const std::vector<double> figures = observer->figures();
    mine.figures.insert(mine.figures.end(), figures.begin(), figures.end());
  }
  Agreement agreed = train::agree(batches, mine, parts_.meshes, parts_.world);
  size_t first = 0;
  for (const auto& observer : parts_.observers) {
    const size_t count = observer->figures().size();
    if (count == 0) continue;
    std::vector<double> of_ranks;
    for (size_t at = first; at < agreed.figures.size(); at += mine.figures.size())
      of_ranks.insert(of_ranks.end(), &agreed.figures[at], &agreed.figures[at] + count);
    first += count;
    observer->receive_figures(of_ranks);
  }
  return agreed;
}

// The learning-rate factor of the schedule's step k is factor(k - 1): it depends only on the step's number.
void Trainer::schedule_step() {
  parts_.optimizer.set_lr_factor(parts_.schedule.factor(progress_.schedule_steps++));
}

at::Tensor Trainer::forward_backward(const StepInput& input) {
  const PhaseScope forward_backward = phase(Phase::ForwardBackward);
  return parts_.runner->forward_backward(input.batches, input.tokens.global);
}

ClippedStep Trainer::run_graph(const StepInput& input) {
  const PhaseScope forward_backward = phase(Phase::ForwardBackward);
  return graphs_->run(progress_.step, input);
}

// The previous step's late numbers are read here, once this step's work is queued, so that the device stays
// busy while the host waits for them. A save may still be reading what the optimizer is about to write.
void Trainer::update(StepInput input, const ClippedStep& clipped) {
  read_numbers();
  if (parts_.checkpoints) parts_.checkpoints->wait_for_staging();
  for (const auto& [name, policy] : parts_.policies) policy->before_update();
  unread_ = std::move(input);
  if (!numbers_->are_late()) read_numbers();
  if (graphs_)
    graphs_->update_weights(progress_.step, clipped);
  else
    numbers_->update_weights(clipped);
  numbers_->send(clipped);
}

const StepValues& Trainer::settle() {
  read_numbers();
  log_step();
  return values_;
}

void Trainer::read_numbers() {
  if (!unread_) return;
  const StepInput input = *std::exchange(unread_, std::nullopt);
  values_ = numbers_->read();
  judge(values_, input);
}

// All ranks reach the same verdict: the norm is the same everywhere, and the losses' flag is exchanged.
void Trainer::judge(const StepValues& values, const StepInput& input) {
  if (values.finite()) {
    for (const auto& [name, policy] : parts_.policies) policy->judge(*this, values);
    return;
  }
  const NonFiniteStep step{values, input, describe_nonfinite(values)};
  const auto explain = [&] { return this->explain(step); };
  bool skipped = false;
  for (const auto& [name, policy] : parts_.policies) skipped = policy->skip(step.problem, explain) || skipped;
  if (!skipped) throw UnsoundRun(step.problem + ". The optimizer step was not taken." + explain());
}

std::string Trainer::explain(const NonFiniteStep& step) {
  std::string text;
  for (const auto& [name, policy] : parts_.policies)
    if (const std::string part = policy->explain(*this, step); !part.empty()) text += "\n" + part;
  return text;
}

// The losses come first, because each belongs to one rank. One rank's NaN is in every shard of the reduced
// gradients, so the norm only shows which shard it was first seen in.
std::string Trainer::describe_nonfinite(const StepValues& values) const {
  if (values.loss_rank < 0)
    return str("step ", values.step,
               ": the gradient norm isn't finite, though the losses of all ranks are; first seen in the "
               "shard of rank ",
               values.grad_norm.nonfinite_rank);
  const bool mine = values.loss_rank == parts_.world.rank();
  return str("step ", values.step, ": the loss isn't finite on rank ", values.loss_rank,
             mine ? str(" (", values.local_loss, ")") : "");
}

// All ranks of a tensor-parallel group have the same loss.
double Trainer::loss_of_all(const StepValues& values) const {
  const double sum = values.losses.empty()
                         ? parts_.world.everyone()->sum(values.local_loss, {"train::loss_of_all"})
                         : std::accumulate(values.losses.begin(), values.losses.end(), 0.0);
  return sum / parts_.meshes.tp.size();
}

// The speed and memory are those up to now: if numbers are read late, the next step is queued already, but the device
// has only just finished this one.
void Trainer::log_step() {
  if (!unlogged_) return;
  const PhaseScope log = phase(Phase::Log);
  auto [metrics, tokens] = *std::exchange(unlogged_, std::nullopt);
  metrics.grad_norm = values_.grad_norm.norm;
  for (const auto& [name, policy] : parts_.policies) policy->add_metrics(metrics);
  if (parts_.checkpoints) {
    metrics.checkpoint_s = parts_.checkpoints->take_blocked_seconds();
    parts_.window.leave_out(*metrics.checkpoint_s);
  }
  parts_.window.close(metrics);
  const StepSums sums = sum_over_ranks(values_.losses, tokens);
  metrics.loss = sums.loss;
  metrics.max_loss = sums.max_loss;
  metrics.n_tokens_seen = progress_.tokens_before + sums.tokens_seen;
  for (const auto& observer : parts_.observers) observer->logged(metrics);
}

// The state is saved last: a run that is killed before that resumes from an earlier step, and validates this
// one again.
void Trainer::end_step() {
  for (const auto& [name, policy] : parts_.policies)
    if (policy->end_step(*this)) return;
  save_if_due();
}

RunEnd Trainer::finish() {
  const PhaseScope finish = phase(Phase::Finish);
  settle();
  if (std::ranges::any_of(parts_.observers, [](const auto& o) { return !o->figures().empty(); }))
    exchange({}, {});
  RunEnd end{.step = progress_.step};
  if (stopping_) end.stop = stop();
  if (parts_.checkpoints) parts_.checkpoints->end();
  for (const auto& observer : parts_.observers) observer->flush();
  log_data_read();
  log::info_rank0(!stopping_   ? "training completed"
                  : is_loaded_ ? str("training stopped after step ", end.step, " of ", options_.steps)
                               : "training stopped before it began");
  return end;
}

void Trainer::log_data_read() const {
  const int64_t rows = parts_.loader.num_rows();
  if (!is_loaded_ || rows == 0) return;
  const int64_t tokens =
      progress_.tokens_before + parts_.window.local_tokens_seen() / rows * parts_.loader.num_lanes();
  char epochs[64] = "";
  if (options_.tokens_per_epoch > 0)
    std::snprintf(epochs, sizeof epochs, ", about %.3g epochs of the training data",
                  static_cast<double>(tokens) / static_cast<double>(options_.tokens_per_epoch));
  log::info_rank0(str("up to step ", progress_.step, " the run has read ", tokens, " tokens", epochs));
}

StopCause Trainer::stop() {
  StopCause cause;
  for (const auto& [name, policy] : parts_.policies) {
    policy->stopped();
    if (auto known = policy->stop_cause(); known && cause.reason.empty()) cause = *std::move(known);
  }
  if (cause.reason.empty()) cause.reason = "a policy";
  for (const auto& observer : parts_.observers) observer->stopped(cause.signal);
  parts_.loader.abandon_reading();
  save_at_stop(cause.reason);
  return cause;
}

// If the data ends before options_.steps, the step where it ends is the last one, and is saved as such.
int64_t Trainer::last_step() const {
  const auto end = parts_.loader.num_steps();
  if (!end) return options_.steps;
  return std::min(options_.steps, progress_.step + std::max<int64_t>(0, *end - parts_.loader.state().steps));
}

// An earlier start of this run reached the end of the data and saved the model alone as its result, so
// nothing is left to do.
bool Trainer::has_ended() const {
  const int64_t last = last_step();
  if (!parts_.checkpoints || last == options_.steps || last <= progress_.step) return false;
  if (!parts_.checkpoints->has_model_alone(last)) return false;
  log::info_rank0(str("this run is complete: the data ends after step ", last, " of ", options_.steps,
                      ", and the model of that step is saved"));
  return true;
}

Registry<MakePolicy>& trainer_policies() {
  static Registry<MakePolicy> registry("trainer policy");
  return registry;
}

}  // namespace titan::train
