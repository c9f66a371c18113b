#pragma once

// [activation_checkpoint], and what a model family's parallelize function makes of it.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "titan/config/table.h"
#include "titan/parallel/activation_checkpoint.h"

namespace titan::train {

/// [activation_checkpoint]
struct ActivationCheckpointSettings {
  std::string mode = "none";              ///< "none", "full", "selective", "offload" or "memory_budget"
  std::string selective_ac_option = "2";  ///< "op", or every so many layers
  config::StringList per_op_sac_force_recompute_mm_shapes_by_fqns = {"moe.router.gate"};
  bool early_stop = true;
  bool preserve_rng_state = true;
  std::string determinism_check = "default";
  double memory_budget = 0.5;  ///< from full recomputation (0) to none (1)
  std::optional<int64_t>
      memory_budget_bytes;  ///< the same in bytes of a rank, for all forwards that are under way
};

void describe(config::Table<ActivationCheckpointSettings>& table);

/// How a model's layers are to be checkpointed.
struct ActivationCheckpoint {
  std::optional<LayersPolicy> policy;  ///< empty: not at all
  ActivationCheckpointOptions options;
};

/// `group`: the ranks that have to come to one choice under a memory budget.
ActivationCheckpoint activation_checkpoint(const ActivationCheckpointSettings& settings,
                                           std::shared_ptr<dist::Group> group);

/// `layers`: in the order of their calls; `first_number`: of the first one in the whole model.
void apply_activation_checkpoint(const std::vector<nn::AnyRef>& layers,
                                 const ActivationCheckpoint& checkpoint, int64_t first_number = 0);

}  // namespace titan::train
