#pragma once

// The weights of a group that travel in Float8, and their scales.

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "titan/dist/collectives.h"
#include "titan/float8/products.h"

namespace titan::fsdp {

struct Float8Weights {
  std::vector<size_t> slots;
  float8::WeightGather how;  ///< one recipe, so one way for all
  at::Tensor scales;         ///< [slots], of the shards' version `version`
  uint32_t version = 0;

  bool empty() const { return slots.empty(); }
  /// The place of `slot` among `slots`, or -1.
  int64_t find(size_t slot) const;
};

/// The largest of all ranks' values, element by element, over the shards' ranks and the parts'. A NaN stays
/// (a reduction's maximum may lose it).
at::Tensor largest_of_ranks(const at::Tensor& amaxes, dist::Group& shards, const ops::RankParts* parts,
                            const char* name);

}  // namespace titan::fsdp
