#include "train/pipeline/pipeline_runner.h"

#include <algorithm>
#include <exception>
#include <set>

#include "parallel/interned.h"
#include "titan/core/error.h"
#include "titan/dist/world.h"
#include "titan/parallel/fsdp.h"
#include "titan/parallel/pipeline_schedule.h"
#include "train/pipeline/running_step.h"

namespace titan::train {

namespace {

using pipeline::Action;
using pipeline::Schedule;
using Kind = Action::Kind;

bool is_forward_side(Kind kind) {
  return kind == Kind::Forward || kind == Kind::SendForward || kind == Kind::ReceiveForward;
}

bool gathers_by_schedule(const Schedule& schedule) {
  return std::any_of(schedule.ranks.begin(), schedule.ranks.end(), [](const std::vector<Action>& actions) {
    return std::any_of(actions.begin(), actions.end(),
                       [](const Action& action) { return is_parameter_action(action.kind); });
  });
}

std::string numbers(const std::vector<int>& values) {
  std::string text;
  for (const int value : values) text += str(text.empty() ? "" : ", ", value);
  return text.empty() ? "none" : text;
}

void check_stages(const Schedule& schedule, int rank, const std::vector<Stage>& stages) {
  std::vector<int> expected, own;
  for (int stage = 0; stage < schedule.num_stages; ++stage)
    if (schedule.rank_of_stage[static_cast<size_t>(stage)] == rank) expected.push_back(stage);
  for (const Stage& stage : stages) own.push_back(stage.index);
  TITAN_CHECK(own == expected, "schedule ", schedule.name, " has pipeline rank ", rank, " run the stages ",
              numbers(expected), ", but this rank built ", numbers(own));
}

}  // namespace

std::vector<data::Batch> split_rows(const std::vector<data::Batch>& batches, int64_t rows) {
  std::vector<data::Batch> parts;
  for (const data::Batch& batch : batches) {
    const int64_t all = batch.input_BS.size(0);
    if (rows == all) {
      parts.push_back(batch);
      continue;
    }
    TITAN_CHECK(rows > 0 && all % rows == 0, "a batch of ", all, " rows in micro-batches of ", rows);
    for (int64_t first = 0; first < all; first += rows) {
      data::Batch part{batch.input_BS.narrow(0, first, rows), batch.labels_BS.narrow(0, first, rows)};
      part.valid_tokens = part.labels_BS.ne(data::kIgnoredLabel).sum().item<int64_t>();
      parts.push_back(std::move(part));
    }
  }
  return parts;
}

PipelineRunner::PipelineRunner(std::vector<Stage> stages, const DeviceMesh& pp, at::Device device)
    : stages_(std::move(stages)), links_(pp), device_(device) {}

int64_t PipelineRunner::local_stage(int index) const {
  for (size_t i = 0; i < stages_.size(); ++i)
    if (stages_[i].index == index) return static_cast<int64_t>(i);
  return -1;
}

StepPlan::Planned PipelineRunner::planned(const Action& action, const Schedule& schedule) const {
  StepPlan::Planned planned{.action = action, .stage = static_cast<size_t>(local_stage(action.stage))};
  if (is_parameter_action(action.kind)) return planned;
  const auto cell = [&](int64_t stage) { return stage * schedule.num_micro_batches + action.micro_batch; };
  planned.cell = static_cast<size_t>(cell(static_cast<int64_t>(planned.stage)));
  const bool incoming = action.kind == Kind::ReceiveForward || action.kind == Kind::ReceiveBackward;
  // The other end of the message.
  const int other = is_forward_side(action.kind) != incoming ? action.stage + 1 : action.stage - 1;
  if (incoming || action.kind == Kind::SendForward || action.kind == Kind::SendBackward) {
    const int peer = schedule.rank_of_stage.at(static_cast<size_t>(other));
    planned.link = incoming ? &links_.from(peer) : &links_.to(peer);
    planned.label = interned(to_string(action));
    planned.boundary = static_cast<size_t>(std::max(action.stage, other));
  } else if (const int64_t neighbour = local_stage(other); neighbour >= 0) {
    planned.neighbour_cell = cell(neighbour);  // unused by W
  }
  return planned;
}

// A call that carries several messages has the label of the last.
void PipelineRunner::join_messages(StepPlan& plan, const Schedule& schedule) const {
  // Both ends know these types, so both join the same messages.
  const auto type_of = [&](const Action& send) -> const TensorType& {
    return plan
        .boundaries_[static_cast<size_t>(send.kind == Kind::SendForward ? send.stage + 1 : send.stage)];
  };
  const auto joined = pipeline::joined_with_next(
      schedule, [&](const Action& one, const Action& next) { return type_of(one) == type_of(next); });
  const auto& mine = joined[static_cast<size_t>(links_.mesh().rank())];
  for (size_t i = 0; i < mine.size(); ++i)
    plan.actions_[i].joined_with_next = mine[i] && plan.actions_[i].link->group->has_batches(device_);
}

StepPlan PipelineRunner::plan(const Schedule& schedule, std::vector<TensorType> boundaries) {
  const int rank = links_.mesh().rank();
  TITAN_CHECK(schedule.num_ranks() == links_.mesh().size(), "schedule ", schedule.name, " is for ",
              schedule.num_ranks(), " pipeline ranks, and there are ", links_.mesh().size());
  if (schedule.num_stages > 1)
    pipeline::check_schedule(schedule, {.purpose = has_backward(schedule) ? pipeline::Purpose::Training
                                                                          : pipeline::Purpose::Evaluation});
  check_stages(schedule, rank, stages_);
  TITAN_CHECK(schedule.num_stages == 1 || boundaries.size() == static_cast<size_t>(schedule.num_stages),
              "a schedule of ", schedule.num_stages, " stages needs the type of what enters each, got ",
              boundaries.size());
  links_.connect(schedule);
  if (shardings_.empty() && gathers_by_schedule(schedule))
    for (const Stage& stage : stages_) shardings_.emplace_back(stage.model->root());

  StepPlan plan;
  plan.boundaries_ = std::move(boundaries);
  plan.num_stages_ = schedule.num_stages;
  plan.num_micro_batches_ = schedule.num_micro_batches;
  for (const Action& action : schedule.ranks[static_cast<size_t>(rank)])
    plan.actions_.push_back(planned(action, schedule));
  if (has_communication(schedule)) join_messages(plan, schedule);
  std::set<size_t> done;  // stages
  for (auto planned = plan.actions_.rbegin(); planned != plan.actions_.rend(); ++planned)
    if (planned->action.kind == Kind::Backward || planned->action.kind == Kind::BackwardInput)
      planned->last_backward = done.insert(planned->stage).second;
  return plan;
}

// Adds the error of the first rank to fail: a rank that is lost takes its neighbours with it, and they
// theirs.
std::string PipelineRunner::failure_of(const StepPlan& plan, size_t action, const std::string& reason) const {
  const std::string mine =
      str("in action ", to_string(plan.actions_[action].action), " (", action + 1, " of ",
          plan.actions_.size(), ") of pipeline rank ", links_.mesh().rank(), ": ", reason);
  const std::string first = dist::tell_failure(links_.mesh().world(), mine, [this] { links_.close(); });
  return first.empty() ? mine : str(mine, "\nThe first to fail was ", first);
}

// Drops what an exception left of an earlier step.
void PipelineRunner::prepare_step() {
  for (ScheduledSharding& sharding : shardings_) sharding.discard();
  if (!shardings_.empty()) return;
  for (const Stage& stage : stages_) discard_gradients(stage.model->root());
}

void PipelineRunner::set_schedules(const ScheduleParts& training,
                                   const std::optional<ScheduleParts>& evaluation, int64_t micro_batch_rows,
                                   TiedGradients tied) {
  training_ = plan(training.schedule, training.boundaries);
  if (evaluation) evaluation_ = plan(evaluation->schedule, evaluation->boundaries);
  micro_batch_rows_ = micro_batch_rows;
  tied_ = std::move(tied);
}

at::Tensor PipelineRunner::forward_backward(const std::vector<data::Batch>& batches,
                                            int64_t global_valid_tokens) {
  const at::Tensor loss = run(training_.value(), split_rows(batches, micro_batch_rows_), global_valid_tokens);
  tied_.sum();
  return loss;
}

at::Tensor PipelineRunner::forward(const data::Batch& batch, int64_t global_valid_tokens) {
  const StepPlan& plan = evaluation_.value();
  return run(plan, split_rows({batch}, batch.input_BS.size(0) / plan.num_micro_batches()),
             global_valid_tokens);
}

at::Tensor PipelineRunner::run(const StepPlan& plan, const std::vector<data::Batch>& micro_batches,
                               int64_t global_valid_tokens) {
  check_valid_tokens(global_valid_tokens);
  TITAN_CHECK(micro_batches.size() == static_cast<size_t>(plan.num_micro_batches_), "a plan for ",
              plan.num_micro_batches_, " micro-batches got ", micro_batches.size());
  TITAN_CHECK(
      !failed_,
      "a step of this pipeline has failed, and messages of its stages may still be on the way: the next step "
      "would take them for its own. Start the job again");
  prepare_step();
  size_t action = 0;
  try {
    RunningStep step(*this, plan, micro_batches,
                     global_valid_tokens);  // destroyed before its failure is reported
    for (; action < plan.actions_.size(); ++action)
      times_ ? step.perform_timed(plan.actions_[action], *times_) : step.perform(plan.actions_[action]);
    return step.finish();
  } catch (const std::exception& error) {
    failed_ = true;
    throw Error(failure_of(plan, std::min(action, plan.actions_.size() - 1), reason_of(error)));
  }
}

}  // namespace titan::train
