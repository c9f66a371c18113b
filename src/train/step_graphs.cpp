#include "train/step_graphs.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "dist/device_backend.h"
#include "dist/work_graph.h"
#include "parallel/fsdp/fsdp_state.h"
#include "titan/core/error.h"
#include "titan/core/log.h"

namespace titan::train {

namespace {

template <class Record>
void try_to_record(const char* what, int64_t step, const Record& record) {
  try {
    record();
  } catch (const std::exception& error) {
    throw Error(
        str(what, " ", step, " can't be recorded as a CUDA graph (compile.enable): ", reason_of(error)));
  }
}

void reshard(const std::vector<std::unique_ptr<TrainableModel>>& models) {
  for (const auto& model : models) fsdp::reshard_all(model->root().module());
}

}  // namespace

void prepare_to_record(const std::vector<std::unique_ptr<TrainableModel>>& models,
                       const std::vector<Parameter>& parameters) {
  reshard(models);
  for (const Parameter& parameter : parameters) parameter.data.local.unsafeGetTensorImpl()->bump_version();
}

struct StepGraphs::Recorded {
  explicit Recorded(at::Device device) : graph(device), update(device) {}

  /// Whether a launch can read batches like these.
  bool fits(const std::vector<data::Batch>& others) const {
    return std::ranges::equal(batches, others, [](const data::Batch& a, const data::Batch& b) {
      return a.input_BS.sizes() == b.input_BS.sizes() && a.labels_BS.sizes() == b.labels_BS.sizes();
    });
  }

  /// Whether all memory is there that the steps before had made and the graph uses.
  bool has_its_memory() const { return num_replaced == dist::num_replaced_memories(); }

  int64_t num_replaced = 0;                                  // before it was recorded
  std::vector<data::Batch> batches;                          // on the device: what the graph reads
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients;  // parameter, its gradient
  ClippedStep clipped;
  dist::WorkGraph graph, update;  // destroyed first: they wait until their last launch has ended
  bool has_update = false;
};

StepGraphs::StepGraphs(TrainerParts& parts, StepNumbers& numbers)
    : parts_(parts),
      numbers_(numbers),
      copies_(dist::Stream::create(parts.device)),
      inverse_tokens_(at::empty({}, at::dtype(at::kDouble).device(parts.device))) {}
StepGraphs::~StepGraphs() = default;

bool StepGraphs::can_launch(const std::vector<data::Batch>& batches) const {
  return !recorded_ || (recorded_->fits(batches) && recorded_->has_its_memory());
}

void StepGraphs::drop(int64_t step) {
  log::info_rank0(
      str("step ", step,
          " can't launch the CUDA graph, because its batches have other sizes or buffers have grown: "
          "it runs as usual, and the next step is recorded"));
  recorded_.reset();
  reshard(parts_.models);
  num_usual_steps_ = kUsualSteps - 1;
}

ClippedStep StepGraphs::run(int64_t step, const StepInput& input) {
  for (const data::Batch& batch : input.batches)
    TITAN_CHECK(!batch.document_end,
                "a step with attention within documents can't be recorded as a CUDA graph, because documents "
                "differ from step to step");
  if (num_usual_steps_ < kUsualSteps) {
    ++num_usual_steps_;
    return numbers_.clip(parts_.runner->forward_backward(input.batches, input.tokens.global));
  }
  if (!recorded_) recorded_ = record(step, input);
  return launch(input);
}

std::unique_ptr<StepGraphs::Recorded> StepGraphs::record(int64_t step, const StepInput& input) {
  const at::NoGradGuard no_grad;
  auto recorded = std::make_unique<Recorded>(parts_.device);
  for (const data::Batch& batch : input.batches)
    recorded->batches.push_back({at::empty_like(batch.input_BS, parts_.device),
                                 at::empty_like(batch.labels_BS, parts_.device), batch.valid_tokens});
  prepare_to_record(parts_.models, parts_.parameters);
  recorded->num_replaced = dist::num_replaced_memories();
  try_to_record("step", step, [&] {
    recorded->graph.record([&] {
      const at::AutoGradMode with_gradients(true);
      const at::Tensor loss =
          parts_.runner->forward_backward(recorded->batches, ops::ValidTokens::on_device(inverse_tokens_));
      recorded->clipped = numbers_.clip(loss);
    });
  });
  for (const Parameter& parameter : parts_.parameters)
    if (parameter.data.local.grad().defined())
      recorded->gradients.emplace_back(parameter.data.local, parameter.data.local.grad());
  log::info_rank0(
      str("step ", step, " is recorded as a CUDA graph, which further steps of the same sizes launch",
          parts_.optimizer.can_be_recorded()
              ? ""
              : ". The optimizer's part runs as usual: its rule takes the learning rate from the host"));
  return recorded;
}

ClippedStep StepGraphs::launch(const StepInput& input) {
  const at::NoGradGuard no_grad;
  Recorded& recorded = *recorded_;
  reshard(parts_.models);  // a validation may have gathered parameters in memory that the graph uses
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
  inverse_tokens_.fill_(1.0 / static_cast<double>(input.tokens.global));
  recorded.graph.launch();
  for (auto& [parameter, gradient] : recorded.gradients) parameter.mutable_grad() = gradient;
  return recorded.clipped;
}

void StepGraphs::update_weights(int64_t step, const ClippedStep& clipped) {
  if (!recorded_ || !parts_.optimizer.can_be_recorded()) return numbers_.update_weights(clipped);
  parts_.optimizer.write_lrs();
  if (!std::exchange(recorded_->has_update, true)) record_update(step, *recorded_);
  recorded_->update.launch();
  // Sharding and caches of casts have to notice.
  for (const auto& [parameter, gradient] : recorded_->gradients)
    parameter.unsafeGetTensorImpl()->bump_version();
}

void StepGraphs::record_update(int64_t step, Recorded& recorded) {
  try_to_record("the optimizer's part of step", step, [&] {
    recorded.update.record(
        [&] { parts_.optimizer.record_step_unless(recorded.clipped.skip, recorded.clipped.norm.factor); });
  });
}

}  // namespace titan::train
