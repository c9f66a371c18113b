#pragma once

// Splittable: a module whose weights can be cut for tensor parallelism (Shoeybi et al., "Megatron-LM", 2019).

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "titan/ops/rank_parts.h"

namespace titan::nn {

enum class Split {
  Columns,  ///< by what comes out: each rank computes a part of the features (of the logits)
  Rows,     ///< by what goes in: each rank has a part of the features (of the tokens) and gives a summand
};

/// How one parameter follows a split of its module.
struct ParamSplit {
  std::string name;                  ///< within the module
  int64_t dim = -1;                  ///< the dimension that is cut; -1: every rank keeps it whole
  bool gradient_is_summand = false;  ///< of a whole one: each rank's gradient is a part of the sum
};

/// A module that says how. Modules that don't are cut as torch.nn.Linear: weight [out, in], bias [out].
class Splittable {
 public:
  virtual ~Splittable() = default;
  /// Throws Error for a split that the module doesn't know.
  virtual std::vector<ParamSplit> param_splits(Split split) const = 0;
  /// The parameters are this rank's parts from now on.
  virtual void set_split(Split split, std::shared_ptr<const ops::RankParts> parts) = 0;
};

}  // namespace titan::nn
