#include "train/step_runner.h"

#include <ATen/ops/empty.h>

#include "titan/core/error.h"
#include "titan/dist/collectives.h"

namespace titan::train {

Agreement agree(const std::vector<data::Batch>& batches, Vote mine, const Meshes& meshes) {
  Agreement agreed;
  for (const data::Batch& batch : batches) agreed.tokens.local += batch.valid_tokens;
  const at::Tensor sums = at::empty({3}, at::kLong);
  auto* values = sums.mutable_data_ptr<int64_t>();
  values[0] = agreed.tokens.local;
  values[1] = mine == Vote::Stop;
  values[2] = mine == Vote::Fail;
  meshes.batch.group()->all_reduce(sums, dist::ReduceOp::Sum, {"train::count_valid_tokens"}).wait();
  agreed.tokens.global = values[0];
  agreed.vote = values[2] > 0 ? Vote::Fail : values[1] > 0 ? Vote::Stop : Vote::Go;
  for (const DeviceMesh* mesh : {&meshes.rows, &meshes.tp, &meshes.pp}) {
    if (mesh->size() == 1) continue;
    const double highest = mesh->group()->max(static_cast<double>(agreed.vote), {"train::agree_to_stop"});
    agreed.vote = static_cast<Vote>(static_cast<int>(highest));
  }
  return agreed;
}

void check_valid_tokens(int64_t global_valid_tokens) {
  TITAN_CHECK(global_valid_tokens > 0, "a step needs at least one valid token, got ", global_valid_tokens);
}

at::Tensor checked_loss(TrainableModel& model, const at::Tensor& input, const at::Tensor& labels_BS,
                        int64_t global_valid_tokens) {
  at::Tensor loss = model.loss(input, labels_BS, global_valid_tokens);
  const bool is_wide = loss.scalar_type() == at::kFloat || loss.scalar_type() == at::kDouble;
  TITAN_CHECK(is_wide && loss.dim() == 0, "the model's loss must be a scalar in float32 or float64, but is ",
              loss.scalar_type(), " with sizes ", loss.sizes(),
              ": sum the token losses of logits.to(at::kFloat) (TrainableModel::loss)");
  return loss;
}

}  // namespace titan::train
