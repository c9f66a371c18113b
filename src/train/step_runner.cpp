#include "train/step_runner.h"

#include <limits>
#include <vector>

#include <ATen/ops/empty.h>

#include "titan/core/error.h"
#include "titan/dist/collectives.h"

namespace titan::train {

// One exchange. Several ranks may have the same rows; the first of them counts their tokens.
Agreement agree(const std::vector<data::Batch>& batches, Vote mine, const Meshes& meshes,
                const dist::World& world) {
  Agreement agreed;
  for (const data::Batch& batch : batches) agreed.tokens.local += batch.valid_tokens;
  const at::Tensor sums = at::empty({3}, at::kLong);
  auto* values = sums.mutable_data_ptr<int64_t>();
  values[0] = meshes.is_first_of_its_rows() ? agreed.tokens.local : 0;
  values[1] = mine == Vote::Stop;
  values[2] = mine == Vote::Fail;
  world.everyone()->all_reduce(sums, dist::ReduceOp::Sum, {"train::count_valid_tokens"}).wait();
  agreed.tokens.global = values[0];
  agreed.vote = values[2] > 0 ? Vote::Fail : values[1] > 0 ? Vote::Stop : Vote::Go;
  return agreed;
}

// One exchange, added up in the order of ranks. The ranks of a tensor-parallel group have the same loss, and
// each of the ranks that share rows has a part of the rows' loss.
StepSums sum_over_ranks(const StepValues& values, const TokenCounts& tokens, int64_t tokens_seen,
                        const Meshes& meshes, const dist::World& world) {
  constexpr int64_t kNumbers = 4;
  const at::Tensor mine = at::empty({kNumbers}, at::kDouble),
                   all = at::empty({world.size(), kNumbers}, at::kDouble);
  auto* numbers = mine.mutable_data_ptr<double>();
  numbers[0] = meshes.batch.rank();
  numbers[1] = meshes.tp.rank() == 0 ? values.local_loss : 0;
  numbers[2] = static_cast<double>(tokens.local);
  numbers[3] = meshes.is_first_of_its_rows() ? static_cast<double>(tokens_seen) : 0;
  world.everyone()->all_gather(all, mine, {"metrics::step"}).wait();

  StepSums sums;
  std::vector<double> losses(static_cast<size_t>(meshes.batch.size())), counts(losses.size());
  for (int rank = 0; rank < world.size(); ++rank) {
    const double* of_rank = all.const_data_ptr<double>() + rank * kNumbers;
    const auto rows = static_cast<size_t>(of_rank[0]);
    sums.loss += of_rank[1];
    losses.at(rows) += of_rank[1];
    counts.at(rows) = of_rank[2];
    sums.tokens_seen += static_cast<int64_t>(of_rank[3]);
  }
  sums.max_loss = tokens.global == 0 ? sums.loss : -std::numeric_limits<double>::infinity();
  for (size_t rows = 0; rows < losses.size() && tokens.global > 0; ++rows) {
    const double mean =
        counts[rows] > 0 ? losses[rows] * static_cast<double>(tokens.global) / counts[rows] : 0;
    if (!(mean <= sums.max_loss)) sums.max_loss = mean;  // also NaN
  }
  return sums;
}

void check_valid_tokens(const ops::ValidTokens& global_valid_tokens) {
  TITAN_CHECK(global_valid_tokens.on_host() != 0, "a step needs at least one valid token");
}

ops::Documents documents_of(const data::Batch& batch, at::Device device) {
  if (!batch.document_end) return {};
  return ops::documents_ending_with(*batch.document_end, batch.input_BS, /*pinned=*/device.is_cuda());
}

at::Tensor checked_loss(TrainableModel& model, const at::Tensor& input, const at::Tensor& labels_BS,
                        const ops::ValidTokens& global_valid_tokens) {
  at::Tensor loss = model.loss(input, labels_BS, global_valid_tokens);
  const bool is_wide = loss.scalar_type() == at::kFloat || loss.scalar_type() == at::kDouble;
  TITAN_CHECK(is_wide && loss.dim() == 0, "the model's loss must be a scalar in float32 or float64, but is ",
              loss.scalar_type(), " with sizes ", loss.sizes(),
              ": sum the token losses of logits.to(at::kFloat) (TrainableModel::loss)");
  return loss;
}

}  // namespace titan::train
