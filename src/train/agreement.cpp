#include "train/agreement.h"

#include <ATen/ops/empty.h>

#include "titan/dist/collectives.h"

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

}  // namespace titan::train
