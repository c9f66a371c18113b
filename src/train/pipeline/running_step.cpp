#include "train/pipeline/running_step.h"

#include <chrono>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include "dist/trace_range.h"
#include "titan/core/error.h"
#include "titan/parallel/fsdp.h"

namespace titan::train {

GraphRoot::GraphRoot(const at::Tensor& output) {
  if (output.requires_grad()) edge_ = torch::autograd::impl::gradient_edge(output);
}

void GraphRoot::backward(const at::Tensor& grad) {
  const torch::autograd::Edge root = std::exchange(edge_, {});
  torch::autograd::Engine::get_default_engine().execute({root}, {grad}, /*keep_graph=*/false,
                                                        /*create_graph=*/false, /*accumulate_grad=*/true);
}

using Planned = StepPlan::Planned;
using Kind = pipeline::Action::Kind;

namespace {

constexpr const char* kTransferPhase = "pp::transfer";

double steady_now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

RunningStep::RunningStep(PipelineRunner& runner, const StepPlan& plan,
                         const std::vector<data::Batch>& micro_batches, int64_t global_valid_tokens)
    : runner_(runner),
      plan_(plan),
      micro_batches_(micro_batches),
      global_valid_tokens_(global_valid_tokens),
      buffers_(runner.device_),
      cells_(runner.stages_.size() * static_cast<size_t>(plan.num_micro_batches_)),
      loss_(at::zeros({}, at::TensorOptions(runner.device_).dtype(at::kDouble))) {}

void RunningStep::perform(const Planned& due) {
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
      return cell->delayed.compute();
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

void RunningStep::perform_timed(const Planned& due, std::vector<ActionTime>& times) {
  waited_s_ = 0;
  const double start_s = steady_now_s();
  perform(due);
  times.push_back({due.action, start_s, steady_now_s(), waited_s_});
}

void RunningStep::await(const std::shared_ptr<dist::Work>& arrives) {
  if (!arrives) return;
  if (!runner_.times_) return arrives->wait();
  const double start_s = steady_now_s();
  arrives->wait();
  waited_s_ += steady_now_s() - start_s;
}

at::Tensor RunningStep::finish() {
  for (Sent& sent : sends_) sent.work.wait();
  for (ScheduledSharding& sharding : runner_.shardings_) sharding.finish();
  return loss_;
}

ScheduledSharding* RunningStep::sharding_of(const Planned& due) const {
  return runner_.shardings_.empty() ? nullptr : &runner_.shardings_[due.stage];
}

const data::Batch& RunningStep::batch_of(const Planned& due) const {
  return micro_batches_[static_cast<size_t>(due.action.micro_batch)];
}

at::Tensor RunningStep::on_device(const at::Tensor& host) const {
  return host.to(runner_.device_, host.scalar_type(), /*non_blocking=*/true);
}

at::Tensor RunningStep::input_of(const Planned& due, Cell& cell) {
  if (due.action.stage == 0) return on_device(batch_of(due).input_BS);
  await(cell.input_arrives);
  TITAN_INTERNAL_ASSERT(cell.input.defined(), "a stage's forward without its input");
  if (at::GradMode::is_enabled()) cell.input.set_requires_grad(true);
  return cell.input;
}

void RunningStep::forward(const Planned& due) {
  Cell& cell = cells_[due.cell];
  TrainableModel& model = *runner_.stages_[due.stage].model;
  const at::Tensor input = input_of(due, cell);
  if (!at::GradMode::is_enabled()) cell.input.reset();  // no backward will ask for it
  if (is_last(due)) {
    const at::Tensor loss = model.loss(input, on_device(batch_of(due).labels_BS), global_valid_tokens_);
    cell.root = GraphRoot(loss);
    cell.grad_output = at::ones_like(loss, loss.options().requires_grad(false));
    loss_.add_(loss.detach());
    return;
  }
  at::Tensor output = model.hidden(input);
  cell.root = GraphRoot(output);
  at::Tensor passed = output.detach();
  (due.neighbour_cell >= 0 ? cells_[static_cast<size_t>(due.neighbour_cell)].input : cell.output) =
      std::move(passed);
}

void RunningStep::backward(const Planned& due) { walk_graph(due, cells_[due.cell]); }

void RunningStep::backward_input(const Planned& due) {
  Cell& cell = cells_[due.cell];
  ScheduledSharding* sharding = sharding_of(due);
  if (sharding) sharding->delay_weight_gradients(cell.delayed);
  walk_graph(due, cell);
  if (sharding) sharding->stop_delaying();
}

// The graph goes with its root, so that activations don't outlive their backward.
void RunningStep::walk_graph(const Planned& due, Cell& cell) {
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
  (due.neighbour_cell >= 0 ? cells_[static_cast<size_t>(due.neighbour_cell)].grad_output : cell.grad_input) =
      std::move(input_grad);
}

void RunningStep::send(const Planned& due, at::Tensor tensor) {
  const TensorType& type = plan_.boundaries_[due.boundary];
  const bool fits = tensor.defined() && tensor.sizes() == type.sizes && tensor.scalar_type() == type.dtype;
  TITAN_CHECK(
      fits, to_string(due.action), ": the stage gave ",
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

// Drops messages that have arrived. On a device a stream knows which have; gloo knows only while someone
// waits, so on the host this waits for the oldest of several on one way. check_schedule() has made sure that
// its receive comes.
void RunningStep::drop_sent(const pipeline::Link* way) {
  constexpr int kUnderWay = 4;
  int under_way = 0;
  for (auto sent = sends_.rbegin(); sent != sends_.rend(); ++sent)
    if (sent->way == way && ++under_way >= kUnderWay && runner_.device_.is_cpu()) sent->work.wait();
  std::erase_if(sends_, [](Sent& sent) {
    if (sent.work.pending()) return false;
    sent.work.wait();
    return true;
  });
}

at::Tensor RunningStep::receive(const Planned& due, std::shared_ptr<dist::Work>& arrives) {
  at::Tensor buffer = buffers_.take(plan_.boundaries_[due.boundary]);
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

}  // namespace titan::train
