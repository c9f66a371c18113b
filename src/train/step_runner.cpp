#include "train/step_runner.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <iterator>
#include <limits>
#include <vector>

#include <ATen/ops/zeros.h>

#include "titan/core/error.h"
#include "titan/dist/collectives.h"

namespace titan::train {

// Several ranks may have the same rows; the first of them counts their tokens. In a step that is logged, each rank adds its own three numbers to
// zeros of the others: one sum of all, because a gather would be a second exchange. Figures travel as their bits.
Agreement agree(const std::vector<data::Batch>& batches, const Ballot& mine, const Meshes& meshes,
                const dist::World& world) {
  Agreement agreed;
  for (const data::Batch& batch : batches) agreed.tokens.local += batch.valid_tokens;
  constexpr int64_t kOfAll = 4;
  const int64_t num_tokens = mine.tokens_seen ? 3 : 0;
  const int64_t of_rank = num_tokens + static_cast<int64_t>(mine.figures.size());
  const bool is_first = meshes.is_first_of_its_rows();
  const at::Tensor sums = at::zeros({kOfAll + of_rank * world.size()}, at::kLong);
  auto* values = sums.mutable_data_ptr<int64_t>();
  values[0] = is_first ? agreed.tokens.local : 0;
  values[1] = mine.vote == Vote::Stop;
  values[2] = mine.vote == Vote::Fail;
  values[3] = mine.drops_graph;
  int64_t* const own = values + kOfAll + of_rank * world.rank();
  if (mine.tokens_seen) {
    own[0] = meshes.tp.rank() == 0 ? meshes.batch.rank() : -1;
    own[1] = agreed.tokens.local;
    own[2] = is_first ? *mine.tokens_seen : 0;
  }
  std::ranges::transform(mine.figures, own + num_tokens, [](double f) { return std::bit_cast<int64_t>(f); });
  world.everyone()->all_reduce(sums, dist::ReduceOp::Sum, {"train::count_valid_tokens"}).wait();
  agreed.tokens.global = values[0];
  agreed.vote = values[2] > 0 ? Vote::Fail : values[1] > 0 ? Vote::Stop : Vote::Go;
  agreed.drops_graph = values[3] > 0;
  for (const int64_t* at = values + kOfAll; at < values + sums.numel(); at += of_rank) {
    if (mine.tokens_seen) agreed.tokens.ranks.push_back({.rows = at[0], .valid = at[1], .seen = at[2]});
    std::transform(at + num_tokens, at + of_rank, std::back_inserter(agreed.figures),
                   [](int64_t bits) { return std::bit_cast<double>(bits); });
  }
  return agreed;
}

// Added up in the order of ranks. The ranks of a tensor-parallel group have the same loss, and each of the ranks
// that share rows has a part of the rows' loss.
StepSums sum_over_ranks(const std::vector<double>& losses, const TokenCounts& tokens) {
  const std::vector<RankTokens>& ranks = tokens.ranks;
  const auto global = static_cast<double>(tokens.global);
  StepSums sums;
  std::vector<double> of_rows(ranks.size()), counts(ranks.size());
  std::vector<bool> are_rows(ranks.size());
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    sums.tokens_seen += ranks[rank].seen;
    if (ranks[rank].rows < 0) continue;
    const auto rows = static_cast<size_t>(ranks[rank].rows);
    sums.loss += losses.at(rank);
    are_rows.at(rows) = true;
    of_rows.at(rows) += losses.at(rank);
    counts.at(rows) = static_cast<double>(ranks[rank].valid);
  }
  sums.max_loss = global == 0 ? sums.loss : -std::numeric_limits<double>::infinity();
  for (size_t rows = 0; rows < counts.size() && global > 0; ++rows) {
    if (!are_rows[rows] || std::isnan(sums.max_loss)) continue;
    const double mean = counts[rows] > 0 ? of_rows[rows] * global / counts[rows] : 0;
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
