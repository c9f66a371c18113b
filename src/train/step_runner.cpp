// [Note: one-stage step]
// Each batch runs forward and then backward, so that its activations are gone before the next batch starts.
// The loss of a batch is a sum over its tokens, divided by the tokens of the whole step on all ranks:
// gradients add up over batches and ranks without another weight. FSDP reduces them over ranks in the
// backward, and needs to know which batch is the last.

#include "train/step_runner.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "dist/trace_range.h"
#include "titan/core/error.h"
#include "titan/dist/collectives.h"
#include "titan/parallel/fsdp.h"

namespace titan::train {

namespace {

constexpr dist::Label kCountLabel{"train::count_valid_tokens"};

int64_t count_here(const std::vector<data::Batch>& batches) {
  int64_t count = 0;
  for (const data::Batch& batch : batches) count += batch.valid_tokens;
  return count;
}

}  // namespace

Agreement agree(const std::vector<data::Batch>& batches, Vote mine, const Meshes& meshes) {
  Agreement agreed;
  agreed.tokens.local = count_here(batches);
  const at::Tensor sums = at::empty({3}, at::kLong);
  auto* values = sums.mutable_data_ptr<int64_t>();
  values[0] = agreed.tokens.local;
  values[1] = mine == Vote::Stop;
  values[2] = mine == Vote::Fail;
  meshes.batch.group()->all_reduce(sums, dist::ReduceOp::Sum, kCountLabel).wait();
  agreed.tokens.global = values[0];
  agreed.vote = values[2] > 0 ? Vote::Fail : values[1] > 0 ? Vote::Stop : Vote::Go;
  for (const DeviceMesh* mesh : {&meshes.rows, &meshes.tp, &meshes.pp}) {
    if (mesh->size() == 1) continue;
    const double highest = mesh->group()->max(static_cast<double>(agreed.vote), {"train::agree_to_stop"});
    agreed.vote = static_cast<Vote>(static_cast<int>(highest));
  }
  return agreed;
}

TokenCounts count_valid_tokens(const std::vector<data::Batch>& batches, const DeviceMesh& batch_mesh) {
  const int64_t local = count_here(batches);
  return {.local = local, .global = batch_mesh.group()->sum(local, kCountLabel)};
}

void check_valid_tokens(int64_t global_valid_tokens) {
  TITAN_CHECK(global_valid_tokens > 0, "a step needs at least one valid token, got ", global_valid_tokens);
}

at::Tensor OneStageRunner::forward_backward(const std::vector<data::Batch>& batches,
                                            int64_t global_valid_tokens) {
  check_valid_tokens(global_valid_tokens);
  TrainableModel& model = *models_[0].model;
  discard_gradients(model.root());  // of a step that failed
  at::Tensor total = at::zeros({}, at::TensorOptions(device_).dtype(at::kDouble));
  for (size_t i = 0; i < batches.size(); ++i) {
    at::Tensor loss;
    {
      const dist::TraceRange traced([&] { return str("action 0F", i); });
      loss = model.loss(on_device(batches[i].input_BS), on_device(batches[i].labels_BS), global_valid_tokens);
      total.add_(loss.detach());
    }
    const dist::TraceRange traced([&] { return str("action 0B", i); });
    set_last_micro_batch(model.root(), i + 1 == batches.size());
    if (loss.requires_grad()) loss.backward();
  }
  return total;
}

at::Tensor OneStageRunner::forward(const data::Batch& batch, int64_t global_valid_tokens) {
  check_valid_tokens(global_valid_tokens);
  const dist::TraceRange traced([] { return "action 0F0"; });
  const at::Tensor loss =
      models_[0].model->loss(on_device(batch.input_BS), on_device(batch.labels_BS), global_valid_tokens);
  return loss.detach().to(at::kDouble);
}

at::Tensor OneStageRunner::on_device(const at::Tensor& host) const {
  return host.to(device_, host.scalar_type(), /*non_blocking=*/true);
}

}  // namespace titan::train
