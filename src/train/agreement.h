#pragma once

// What all ranks agree on before a step: how many labels count, and whether they make the step at all.
//
// The votes ride on the exchange of token counts, which every step needs anyway; it is between ranks that
// read different rows. Ranks that share rows (tensor, context, pipeline parallel) exchange nothing by then,
// so where there are such axes one number goes along each of them too.

#include <vector>

#include "titan/train/parallel_dims.h"
#include "titan/train/policy.h"

namespace titan::train {

struct Agreement {
  TokenCounts tokens;
  Vote vote = Vote::Go;  ///< the highest of all ranks
};

/// `batches`: this rank's of the step, whole rows. Collective over the world.
Agreement agree(const std::vector<data::Batch>& batches, Vote mine, const Meshes& meshes);

/// The counts alone. `batch_mesh`: the ranks that read different rows.
TokenCounts count_valid_tokens(const std::vector<data::Batch>& batches, const DeviceMesh& batch_mesh);

}  // namespace titan::train
