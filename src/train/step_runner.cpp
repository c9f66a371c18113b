#include "titan/train/step_runner.h"

#include <ATen/ops/zeros.h>

#include "titan/core/error.h"
#include "titan/parallel/fsdp.h"

namespace titan::train {

namespace {

at::Tensor to_device(const at::Tensor& host, at::Device device) {
  return host.to(device, host.scalar_type(), /*non_blocking=*/true);
}

size_t last_backward(const Schedule& schedule) {
  size_t last = schedule.size();
  for (size_t i = 0; i < schedule.size(); ++i)
    if (schedule[i].kind == Action::Kind::Backward) last = i;
  return last;
}

}  // namespace

Schedule one_stage_schedule(int num_micro_batches) {
  Schedule schedule;
  for (int i = 0; i < num_micro_batches; ++i) {
    schedule.push_back({Action::Kind::Forward, i});
    schedule.push_back({Action::Kind::Backward, i});
  }
  return schedule;
}

Schedule forward_schedule(int num_micro_batches) {
  Schedule schedule;
  for (int i = 0; i < num_micro_batches; ++i) schedule.push_back({Action::Kind::Forward, i});
  return schedule;
}

TokenCounts count_valid_tokens(const std::vector<data::Batch>& micro_batches, const DeviceMesh& batch_mesh) {
  TokenCounts counts;
  for (const data::Batch& batch : micro_batches) counts.local += batch.valid_tokens;
  counts.global = batch_mesh.group()->sum(counts.local, {"train::count_valid_tokens"});
  return counts;
}

at::Tensor StepRunner::run(const Schedule& schedule, const std::vector<data::Batch>& micro_batches,
                           int64_t global_valid_tokens) {
  TITAN_CHECK(global_valid_tokens > 0, "a step needs at least one valid token, got ", global_valid_tokens);
  discard_gradients(model_.root());  // of a step that an exception ended
  at::Tensor total = at::zeros({}, at::TensorOptions(device_).dtype(at::kDouble));
  std::vector<at::Tensor> losses(micro_batches.size());
  const size_t last = last_backward(schedule);
  for (size_t i = 0; i < schedule.size(); ++i) {
    at::Tensor& loss = losses.at(static_cast<size_t>(schedule[i].micro_batch));
    if (schedule[i].kind == Action::Kind::Forward) {
      loss = forward(micro_batches[static_cast<size_t>(schedule[i].micro_batch)], global_valid_tokens);
      total.add_(loss.detach());
    } else {
      backward(loss, i == last);
    }
  }
  return total;
}

at::Tensor StepRunner::forward(const data::Batch& micro_batch, int64_t global_valid_tokens) {
  return model_.loss(to_device(micro_batch.input_BS, device_), to_device(micro_batch.labels_BS, device_),
                     global_valid_tokens);
}

// The graph goes with its loss, so that activations don't outlive their backward.
void StepRunner::backward(at::Tensor& loss, bool last) {
  set_last_micro_batch(model_.root(), last);
  loss.backward();
  loss.reset();
}

}  // namespace titan::train
