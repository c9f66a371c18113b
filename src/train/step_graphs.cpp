#include "train/step_graphs.h"

#include <string>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>

#include "dist/work_graph.h"
#include "parallel/fsdp/fsdp_state.h"
#include "titan/core/error.h"
#include "titan/core/log.h"

namespace titan::train {

namespace {

// The first makes buffers and states, the second settles which of them are reused.
constexpr int kUsualSteps = 2;

constexpr size_t kMostGraphs = 4;

// If steps differ so much, hardly any will come again.
constexpr size_t kMostKinds = 16;

template <class Record>
void try_to_record(const char* what, int64_t step, const Record& record) {
  try {
    record();
  } catch (const std::exception& error) {
    throw Error(
        str(what, " ", step, " can't be recorded as a CUDA graph (compile.enable): ", reason_of(error)));
  }
}

}  // namespace

struct StepGraphs::Recorded {
  explicit Recorded(at::Device device) : graph(device), update(device) {}

  std::vector<data::Batch> batches;                          // on the device: what the graph reads
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients;  // parameter, its gradient
  ClippedStep clipped;
  dist::WorkGraph graph, update;  // destroyed first: they wait until their last launch has ended
  bool has_update = false;
};

StepGraphs::StepGraphs(TrainerParts& parts, StepNumbers& numbers)
    : parts_(parts), numbers_(numbers), copies_(dist::Stream::create(parts.device)) {}
StepGraphs::~StepGraphs() = default;

StepGraphs::Kind StepGraphs::kind_of(const StepInput& input) {
  Kind kind = {input.tokens.global};
  for (const data::Batch& batch : input.batches)
    kind.insert(kind.end(), batch.input_BS.sizes().begin(), batch.input_BS.sizes().end());
  return kind;
}

ClippedStep StepGraphs::run(int64_t step, const StepInput& input) {
  running_ = nullptr;
  for (const data::Batch& batch : input.batches)
    TITAN_CHECK(!batch.document_end,
                "a step with attention within documents can't be recorded as a CUDA graph: documents differ "
                "from step to "
                "step");
  const Kind kind = kind_of(input);
  const auto known = recorded_.find(kind);
  if (known != recorded_.end()) return launch(*known->second, input);
  if (recorded_.size() == kMostGraphs || num_steps_.size() == kMostKinds) {
    if (!std::exchange(has_warned_, true))
      log::warning_rank0(str(
          "step ", step,
          " isn't like the steps before, in the sizes of its batches or its number of valid tokens; ",
          recorded_.size(), " kinds of steps are recorded as CUDA graphs, and all others run without one"));
    return run_as_usual(step, input);
  }
  if (num_steps_[kind]++ < kUsualSteps) return run_as_usual(step, input);
  num_steps_.erase(kind);
  Recorded& recorded = *(recorded_[kind] = record(step, input));
  return launch(recorded, input);
}

ClippedStep StepGraphs::run_as_usual(int64_t step, const StepInput& input) {
  return numbers_.clip(step, parts_.runner->forward_backward(input.batches, input.tokens.global));
}

// A validation may have gathered parameters and kept them, in memory that a launch uses, or that a recording would
// use and FSDP would free later.
void StepGraphs::reshard() {
  for (const auto& model : parts_.models) fsdp::reshard_all(model->root().module());
}

std::unique_ptr<StepGraphs::Recorded> StepGraphs::record(int64_t step, const StepInput& input) {
  const at::NoGradGuard no_grad;
  auto recorded = std::make_unique<Recorded>(parts_.device);
  for (const data::Batch& batch : input.batches)
    recorded->batches.push_back({at::empty_like(batch.input_BS, parts_.device),
                                 at::empty_like(batch.labels_BS, parts_.device), batch.valid_tokens});
  reshard();
  // The graph has to compute casts and scales of the weights again, although those of these weights exist.
  for (const Parameter& parameter : parts_.parameters)
    parameter.data.local.unsafeGetTensorImpl()->bump_version();
  try_to_record("step", step, [&] {
    recorded->graph.record([&] {
      const at::AutoGradMode with_gradients(true);
      const at::Tensor loss = parts_.runner->forward_backward(recorded->batches, input.tokens.global);
      recorded->clipped = numbers_.clip(step, loss);
    });
  });
  for (const Parameter& parameter : parts_.parameters)
    if (parameter.data.local.grad().defined())
      recorded->gradients.emplace_back(parameter.data.local, parameter.data.local.grad());
  log::info_rank0(
      str("step ", step, " is recorded as a CUDA graph: further steps of ", input.batches.size(),
          input.batches.size() == 1 ? " batch" : " batches", " and ", input.tokens.global,
          " valid tokens launch it",
          parts_.optimizer.can_be_recorded()
              ? ""
              : ". The optimizer's part runs as usual: its rule takes the learning rate from the host"));
  return recorded;
}

ClippedStep StepGraphs::launch(Recorded& recorded, const StepInput& input) {
  const at::NoGradGuard no_grad;
  reshard();
  const dist::Stream current = dist::Stream::current(parts_.device);
  copies_.wait(current);  // the launch before reads the same tensors
  {
    const dist::StreamGuard on_copies(copies_);
    for (size_t i = 0; i < input.batches.size(); ++i) {
      recorded.batches[i].input_BS.copy_(input.batches[i].input_BS, /*non_blocking=*/true);
      recorded.batches[i].labels_BS.copy_(input.batches[i].labels_BS, /*non_blocking=*/true);
    }
  }
  current.wait(copies_);
  recorded.graph.launch();
  for (auto& [parameter, gradient] : recorded.gradients) parameter.mutable_grad() = gradient;
  running_ = &recorded;
  return recorded.clipped;
}

void StepGraphs::update_weights(int64_t step, const ClippedStep& clipped) {
  if (!running_ || !parts_.optimizer.can_be_recorded()) return numbers_.update_weights(clipped);
  parts_.optimizer.write_lrs();
  if (!std::exchange(running_->has_update, true)) record_update(step, *running_);
  running_->update.launch();
  // Sharding and caches of casts have to notice.
  for (const auto& [parameter, gradient] : running_->gradients)
    parameter.unsafeGetTensorImpl()->bump_version();
}

void StepGraphs::record_update(int64_t step, Recorded& recorded) {
  try_to_record("the optimizer's part of step", step, [&] {
    recorded.update.record(
        [&] { parts_.optimizer.record_step_unless(recorded.clipped.skip, recorded.clipped.norm.factor); });
  });
}

}  // namespace titan::train
