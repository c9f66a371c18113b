#include "train/pipeline/pipeline_runner.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <functional>
#include <set>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include "dist/trace_range.h"
#include "parallel/interned.h"
#include "parallel/pipeline/actions.h"
#include "titan/core/error.h"
#include "titan/dist/world.h"
#include "titan/parallel/fsdp.h"

namespace titan::train {

namespace {

using pipeline::Action;
using pipeline::Schedule;
using Kind = Action::Kind;
using Planned = StepPlan::Planned;

bool is_forward_side(Kind kind) {
  return kind == Kind::Forward || kind == Kind::SendForward || kind == Kind::ReceiveForward;
}

std::string listed(const std::vector<int>& values) {
  return values.empty() ? "none" : c10::Join(", ", values);
}

void check_stages(const Schedule& schedule, int rank, const std::vector<Stage>& stages) {
  std::vector<int> expected, own;
  for (int stage = 0; stage < schedule.num_stages; ++stage)
    if (schedule.rank_of_stage[static_cast<size_t>(stage)] == rank) expected.push_back(stage);
  for (const Stage& stage : stages) own.push_back(stage.index);
  TITAN_CHECK(own == expected, "schedule ", schedule.name, " has pipeline rank ", rank, " run the stages ",
              listed(expected), ", but this rank built ", listed(own));
}

constexpr const char* kTransferPhase = "pp::transfer";

double steady_now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
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
    TITAN_CHECK(rows > 0 && all % rows == 0, "a batch of ", all,
                " rows can't be split into micro-batches of ", rows);
    for (int64_t first = 0; first < all; first += rows) {
      data::Batch part{batch.input_BS.narrow(0, first, rows), batch.labels_BS.narrow(0, first, rows)};
      part.document_end = batch.document_end;
      parts.push_back(std::move(part));
    }
  }
  return parts;
}

// All ranks agree on the copy that isn't a duplicate: the first one on the first rank that has any.
TiedGradients::TiedGradients(std::vector<Parameter>& parameters, const DeviceMesh& pp,
                             const TiedHolders& all_holders) {
  for (const auto& [name, holders] : all_holders) {
    Tied tied;
    tied.name = interned(name);
    for (Parameter& parameter : parameters) {
      if (parameter.name != name) continue;
      parameter.duplicate = !tied.copies.empty() || holders.front() != pp.rank();
      tied.copies.push_back(parameter.data.local);
    }
    // A frozen parameter has no gradient to sum, and a tensor-parallel part without rows has an empty one.
    if (tied.copies.empty() || !tied.copies.front().requires_grad() || tied.copies.front().numel() == 0)
      continue;
    if (holders.size() > 1) {
      std::vector<int> ranks;
      for (const int holder : holders) ranks.push_back(pp.ranks()[static_cast<size_t>(holder)]);
      tied.group = pp.world().group(ranks, "pp.tied." + name, "tied");
    }
    tied_.push_back(std::move(tied));
  }
}

void TiedGradients::sum() const {
  at::NoGradGuard no_grad;
  for (const Tied& tied : tied_) {
    const at::Tensor& first = tied.copies.front().grad();
    TITAN_CHECK(first.defined(), "tied parameter '", tied.name, "' has no gradient to sum");
    for (size_t i = 1; i < tied.copies.size(); ++i) first.add_(tied.copies[i].grad());
    if (tied.group)
      tied.group->all_reduce(first, dist::ReduceOp::Sum, {"pp::tied_gradient", tied.name}).wait();
    for (size_t i = 1; i < tied.copies.size(); ++i) tied.copies[i].grad().copy_(first);
  }
}

/// The start of a backward. It keeps a tensor's graph but not its memory, so that a sent tensor can be freed
/// before its backward.
class GraphRoot {
 public:
  GraphRoot() = default;
  explicit GraphRoot(const at::Tensor& output);
  /// True if the output doesn't require a gradient.
  bool empty() const { return !edge_.is_valid(); }
  /// Runs the backward from `grad`, which has the output's shape and dtype, and frees the graph.
  void backward(const at::Tensor& grad);

 private:
  torch::autograd::Edge edge_;
};

GraphRoot::GraphRoot(const at::Tensor& output) {
  if (output.requires_grad()) edge_ = torch::autograd::impl::gradient_edge(output);
}

void GraphRoot::backward(const at::Tensor& grad) {
  const torch::autograd::Edge root = std::exchange(edge_, {});
  torch::autograd::Engine::get_default_engine().execute({root}, {grad}, /*keep_graph=*/false,
                                                        /*create_graph=*/false, /*accumulate_grad=*/true);
}

/// A step's sends on a link before it waits for the oldest of them.
constexpr int kMostInFlight = 4;

/// The state of one step, local to PipelineRunner::run: an exception drops it all, without waiting for
/// messages.
class RunningStep {
 public:
  RunningStep(PipelineRunner& runner, const StepPlan& plan, const std::vector<data::Batch>& micro_batches,
              const ops::ValidTokens& global_valid_tokens)
      : runner_(runner),
        plan_(plan),
        micro_batches_(micro_batches),
        global_valid_tokens_(global_valid_tokens),
        buffers_(runner.device_),
        cells_(runner.stages_.size() * static_cast<size_t>(plan.num_micro_batches)),
        loss_(at::zeros({}, at::TensorOptions(runner.device_).dtype(at::kDouble))) {}
  void perform(const Planned& due) {
    const dist::TraceRange traced([&] { return "action " + to_string(due.action); });
    Cell* cell = due.action.micro_batch >= 0 ? &cells_[due.cell] : nullptr;
    switch (due.action.kind) {
      case Kind::Forward:
        return forward(due);
      case Kind::Backward:
        return backward(due);
      case Kind::BackwardInput:
        return backward_input(due);
      case Kind::BackwardWeight:
        return due.before_reduction ? sharding_of(due)->compute_last(cell->delayed) : cell->delayed.compute();
      case Kind::SendForward:
        return send(due, std::exchange(cell->output, {}));
      case Kind::SendBackward:
        return send(due, std::exchange(cell->grad_input, {}));
      case Kind::ReceiveForward:
        cell->input = receive(due, cell->input_arrives);
        return;
      case Kind::ReceiveBackward:
        cell->grad_output = receive(due, cell->grad_arrives);
        return;
      case Kind::Unshard:
        return sharding_of(due)->unshard();
      case Kind::Reshard:
        return sharding_of(due)->reshard();
      case Kind::Reduce:
        return sharding_of(due)->reduce();
    }
  }
  void perform_timed(const Planned& due, std::vector<ActionTime>& times) {
    waited_s_ = 0;
    const double start_s = steady_now_s();
    perform(due);
    times.push_back({due.action, start_s, steady_now_s(), waited_s_});
  }
  /// Waits for the messages in flight; returns the loss.
  at::Tensor finish() {
    for (Sent& sent : sends_) sent.work.wait();
    for (ScheduledSharding& sharding : runner_.shardings_) sharding.finish();
    return loss_;
  }

 private:
  /// One stage and micro-batch. The output of a stage's forward is kept until it is sent, its input until the
  /// backward.
  struct Cell {
    at::Tensor input, output, grad_output, grad_input;
    std::shared_ptr<dist::Work> input_arrives, grad_arrives;  // shared by the messages of one call
    GraphRoot root;
    DelayedGradients delayed;
  };

  /// A message in flight to another rank.
  struct Sent {
    const pipeline::Link* link = nullptr;
    dist::Work work;
  };

  void forward(const Planned& due) {
    if (due.before_reduction) sharding_of(due)->set_last_forward(true);
    compute_forward(due);
    if (due.before_reduction) sharding_of(due)->set_last_forward(false);
  }
  void compute_forward(const Planned& due) {
    Cell& cell = cells_[due.cell];
    TrainableModel& model = *runner_.stages_[due.stage].model;
    const at::Tensor input = input_of(due, cell);
    if (!at::GradMode::is_enabled()) cell.input.reset();  // no backward will need it
    if (const ops::Documents documents = documents_of(batch_of(due), runner_.device_))
      model.set_documents(documents.to(runner_.device_));
    if (is_last(due)) {
      const at::Tensor loss =
          checked_loss(model, input, on_device(batch_of(due).labels_BS), global_valid_tokens_);
      cell.root = GraphRoot(loss);
      cell.grad_output = at::ones_like(loss, loss.options().requires_grad(false));
      loss_.add_(loss.detach());
      return;
    }
    at::Tensor output = model.hidden(input);
    cell.root = GraphRoot(output);
    at::Tensor passed = output.detach();
    (due.neighbor_cell >= 0 ? cells_[static_cast<size_t>(due.neighbor_cell)].input : cell.output) =
        std::move(passed);
  }
  void backward(const Planned& due) {
    walk_graph(due, cells_[due.cell]);
    if (due.before_reduction) sharding_of(due)->end_last_backward();
  }
  void backward_input(const Planned& due) {
    Cell& cell = cells_[due.cell];
    ScheduledSharding* sharding = sharding_of(due);
    if (sharding) sharding->delay_weight_gradients(cell.delayed);
    walk_graph(due, cell);
    if (sharding) sharding->stop_delaying();
  }
  // The backward takes the root and frees its graph, so that activations don't outlive their backward.
  void walk_graph(const Planned& due, Cell& cell) {
    await(cell.grad_arrives);
    const at::Tensor grad = std::exchange(cell.grad_output, {});
    TITAN_INTERNAL_ASSERT(grad.defined(), "a stage's backward without a gradient");
    if (ScheduledSharding* sharding = sharding_of(due)) {
      sharding->wait();
    } else {
      set_last_micro_batch(runner_.stages_[due.stage].model->root(), due.last_backward);
    }
    if (!cell.root.empty()) cell.root.backward(grad);
    const at::Tensor input = std::exchange(cell.input, {});
    if (due.action.stage == 0) return;
    at::Tensor input_grad = input.grad();
    if (!input_grad.defined()) input_grad = at::zeros_like(input);  // the stage doesn't use it
    (due.neighbor_cell >= 0 ? cells_[static_cast<size_t>(due.neighbor_cell)].grad_output : cell.grad_input) =
        std::move(input_grad);
  }
  void send(const Planned& due, at::Tensor tensor) {
    const TensorType& type = plan_.boundaries[due.boundary];
    const bool fits = tensor.defined() && tensor.sizes() == type.sizes && tensor.scalar_type() == type.dtype;
    TITAN_CHECK(
        fits, to_string(due.action), ": the stage returned ",
        tensor.defined() ? titan::str(tensor.scalar_type(), " of ", tensor.sizes()) : titan::str("nothing"),
        ", but ", type.dtype, " of ", at::IntArrayRef(type.sizes), " is expected between these stages");
    batch_.push_back(tensor.contiguous().view(-1));
    if (due.joined_with_next) return;
    drop_sent(due.link);
    const dist::Label label{kTransferPhase, due.label};
    dist::Group& group = *due.link->group;
    sends_.push_back({due.link, batch_.size() == 1 ? group.send(batch_[0], due.link->peer, label)
                                                   : group.send(batch_, due.link->peer, label)});
    batch_.clear();
  }
  // A message's memory is kept until its call was waited for: by the host on a CPU, by the stream that computes on a GPU.
  // Whether the oldest messages have arrived isn't asked: then memory, and what waits for what, would depend on how far
  // the host is ahead. check_schedule() has made sure that they are received.
  void drop_sent(const pipeline::Link* link) {
    const auto is_on_link = [link](const Sent& sent) { return sent.link == link; };
    if (std::ranges::count_if(sends_, is_on_link) < kMostInFlight) return;
    const auto oldest = std::ranges::find_if(sends_, is_on_link);
    oldest->work.wait();
    sends_.erase(oldest);
  }
  at::Tensor receive(const Planned& due, std::shared_ptr<dist::Work>& arrives) {
    at::Tensor buffer = buffers_.take(plan_.boundaries[due.boundary]);
    batch_.push_back(buffer.view(-1));
    awaited_.push_back(&arrives);
    if (due.joined_with_next) return buffer;
    const dist::Label label{kTransferPhase, due.label};
    dist::Group& group = *due.link->group;
    const auto call =
        std::make_shared<dist::Work>(batch_.size() == 1 ? group.receive(batch_[0], due.link->peer, label)
                                                        : group.receive(batch_, due.link->peer, label));
    for (std::shared_ptr<dist::Work>* cell : awaited_) *cell = call;
    batch_.clear();
    awaited_.clear();
    return buffer;
  }
  at::Tensor input_of(const Planned& due, Cell& cell) {
    if (due.action.stage == 0) return on_device(batch_of(due).input_BS);
    await(cell.input_arrives);
    TITAN_INTERNAL_ASSERT(cell.input.defined(), "a stage's forward without its input");
    if (at::GradMode::is_enabled()) cell.input.set_requires_grad(true);
    return cell.input;
  }
  void await(const std::shared_ptr<dist::Work>& arrives) {
    if (!arrives) return;
    if (!runner_.times_) return arrives->wait();
    const double start_s = steady_now_s();
    arrives->wait();
    waited_s_ += steady_now_s() - start_s;
  }
  const data::Batch& batch_of(const Planned& due) const {
    return micro_batches_[static_cast<size_t>(due.action.micro_batch)];
  }
  at::Tensor on_device(const at::Tensor& host) const { return runner_.copies_.on_device(host); }
  bool is_last(const Planned& due) const { return due.action.stage + 1 == plan_.num_stages; }
  ScheduledSharding* sharding_of(const Planned& due) const {
    return runner_.shardings_.empty() ? nullptr : &runner_.shardings_[due.stage];
  }

  PipelineRunner& runner_;
  const StepPlan& plan_;
  const std::vector<data::Batch>& micro_batches_;
  ops::ValidTokens global_valid_tokens_;
  ReceiveBuffers buffers_;
  std::vector<Cell> cells_;
  std::vector<Sent> sends_;
  std::vector<at::Tensor> batch_;                      // the messages of one call, until it has its last
  std::vector<std::shared_ptr<dist::Work>*> awaited_;  // where their cells keep that call
  double waited_s_ = 0;
  at::Tensor loss_;
};

PipelineRunner::PipelineRunner(std::vector<Stage> stages, const DeviceMesh& pp, at::Device device)
    : stages_(std::move(stages)), links_(pp), device_(device), copies_(device) {}

int64_t PipelineRunner::local_stage(int index) const {
  for (size_t i = 0; i < stages_.size(); ++i)
    if (stages_[i].index == index) return static_cast<int64_t>(i);
  return -1;
}

Planned PipelineRunner::planned(const Action& action, const Schedule& schedule) const {
  Planned planned{.action = action, .stage = static_cast<size_t>(local_stage(action.stage))};
  if (is_parameter_action(action.kind)) return planned;
  const auto cell = [&](int64_t stage) { return stage * schedule.num_micro_batches + action.micro_batch; };
  planned.cell = static_cast<size_t>(cell(static_cast<int64_t>(planned.stage)));
  const bool incoming = is_communication(action.kind) && !pipeline::is_send(action.kind);
  // The stage at the other end of the message.
  const int other = is_forward_side(action.kind) != incoming ? action.stage + 1 : action.stage - 1;
  if (is_communication(action.kind)) {
    const int peer = schedule.rank_of_stage.at(static_cast<size_t>(other));
    planned.link = incoming ? &links_.from(peer) : &links_.to(peer);
    planned.label = interned(to_string(action));
    planned.boundary = static_cast<size_t>(std::max(action.stage, other));
  } else if (const int64_t neighbor = local_stage(other); neighbor >= 0) {
    planned.neighbor_cell = cell(neighbor);  // unused by weight-gradient actions
  }
  return planned;
}

// A call that carries several messages has the label of the last.
void PipelineRunner::join_messages(StepPlan& plan, const Schedule& schedule) const {
  // Both ends know these types, so both join the same messages.
  const auto type_of = [&](const Action& send) -> const TensorType& {
    return plan.boundaries[static_cast<size_t>(send.kind == Kind::SendForward ? send.stage + 1 : send.stage)];
  };
  const auto joined = pipeline::joined_with_next(
      schedule, [&](const Action& one, const Action& next) { return type_of(one) == type_of(next); });
  const auto& mine = joined[static_cast<size_t>(links_.mesh().rank())];
  for (size_t i = 0; i < mine.size(); ++i)
    plan.actions[i].joined_with_next = mine[i] && plan.actions[i].link->group->has_batches(device_);
}

namespace {

// A stage's last gradients may come from a whole backward, which its forward prepares for the reductions, or from a
// weights' part.
void mark_before_reductions(std::vector<Planned>& actions) {
  std::set<size_t> done;  // stages
  for (auto last = actions.rbegin(); last != actions.rend(); ++last) {
    const Kind kind = last->action.kind;
    const bool adds = kind == Kind::Backward || kind == Kind::BackwardWeight;
    if (!adds || !done.insert(last->stage).second) continue;
    last->before_reduction = true;
    if (kind != Kind::Backward) continue;
    for (Planned& planned : actions)
      if (planned.action.kind == Kind::Forward && planned.cell == last->cell) planned.before_reduction = true;
  }
}

void mark_last_backwards(std::vector<Planned>& actions) {
  std::set<size_t> done;  // stages
  for (auto planned = actions.rbegin(); planned != actions.rend(); ++planned)
    if (planned->action.kind == Kind::Backward || planned->action.kind == Kind::BackwardInput)
      planned->last_backward = done.insert(planned->stage).second;
}

}  // namespace

StepPlan PipelineRunner::plan(const Schedule& schedule, std::vector<TensorType> boundaries) {
  const int rank = links_.mesh().rank();
  TITAN_CHECK(schedule.num_ranks() == links_.mesh().size(), "schedule ", schedule.name, " is for ",
              schedule.num_ranks(), " pipeline ranks, and there are ", links_.mesh().size());
  if (schedule.num_stages > 1)
    pipeline::check_schedule(schedule, {.purpose = has_backward(schedule) ? pipeline::Purpose::Training
                                                                          : pipeline::Purpose::Evaluation});
  check_stages(schedule, rank, stages_);
  TITAN_CHECK(schedule.num_stages == 1 || boundaries.size() == static_cast<size_t>(schedule.num_stages),
              "a schedule of ", schedule.num_stages, " stages needs one boundary type per stage, got ",
              boundaries.size());
  links_.connect(schedule);
  if (shardings_.empty() && pipeline::any_kind(schedule, pipeline::is_parameter_action))
    for (const Stage& stage : stages_) shardings_.emplace_back(stage.model->root());

  StepPlan plan;
  plan.boundaries = std::move(boundaries);
  plan.num_stages = schedule.num_stages;
  plan.num_micro_batches = schedule.num_micro_batches;
  const auto planned_in = [&](const Schedule& ordered) {
    std::vector<Planned> actions;
    for (const Action& action : ordered.ranks[static_cast<size_t>(rank)])
      actions.push_back(planned(action, ordered));
    if (!shardings_.empty()) mark_before_reductions(actions);
    mark_last_backwards(actions);
    return actions;
  };
  plan.actions = planned_in(schedule);
  if (has_communication(schedule)) join_messages(plan, schedule);
  // Its messages travel one by one, on both ends.
  if (device_.is_cuda())
    plan.first_actions = planned_in(pipeline::in_order_of_first_run(schedule, kMostInFlight));
  return plan;
}

// Adds the error of the first rank to fail: a rank that is lost makes its neighbors fail, and they theirs.
std::string PipelineRunner::failure_of(const std::vector<Planned>& actions, size_t action,
                                       const std::string& reason) const {
  const std::string mine = str("in action ", to_string(actions[action].action), " (", action + 1, " of ",
                               actions.size(), ") of pipeline rank ", links_.mesh().rank(), ": ", reason);
  const std::string first = dist::tell_failure(links_.mesh().world(), mine, [this] { links_.close(); });
  return first.empty() ? mine : str(mine, "\nThe first to fail was ", first);
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
                                            const ops::ValidTokens& global_valid_tokens) {
  const at::Tensor loss = run(training_.value(), split_rows(batches, micro_batch_rows_), global_valid_tokens);
  tied_.sum();
  return loss;
}

at::Tensor PipelineRunner::forward(const data::Batch& batch, const ops::ValidTokens& global_valid_tokens) {
  const StepPlan& plan = evaluation_.value();
  return run(plan, split_rows({batch}, batch.input_BS.size(0) / plan.num_micro_batches), global_valid_tokens);
}

at::Tensor PipelineRunner::run(const StepPlan& plan, const std::vector<data::Batch>& micro_batches,
                               const ops::ValidTokens& global_valid_tokens) {
  check_valid_tokens(global_valid_tokens);
  TITAN_CHECK(micro_batches.size() == static_cast<size_t>(plan.num_micro_batches), "a plan for ",
              plan.num_micro_batches, " micro-batches got ", micro_batches.size());
  TITAN_CHECK(
      !failed_,
      "a step of this pipeline has failed, and messages of its stages may still be on the way: the next step "
      "would take them for its own. Start the job again");
  // Drops what an earlier step left behind when it failed.
  for (ScheduledSharding& sharding : shardings_) sharding.discard();
  if (shardings_.empty())
    for (const Stage& stage : stages_) discard_gradients(stage.model->root());
  const bool is_first = device_.is_cuda() && !plan.has_run;
  const std::vector<Planned>& actions = is_first ? plan.first_actions : plan.actions;
  size_t action = 0;
  try {
    // Destroyed before its failure is reported.
    RunningStep step(*this, plan, micro_batches, global_valid_tokens);
    for (; action < actions.size(); ++action)
      times_ ? step.perform_timed(actions[action], *times_) : step.perform(actions[action]);
    plan.has_run = true;
    return step.finish();
  } catch (const std::exception& error) {
    failed_ = true;
    throw Error(failure_of(actions, std::min(action, actions.size() - 1), reason_of(error)));
  }
}

}  // namespace titan::train
