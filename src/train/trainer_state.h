#pragma once

// The state that a trainer saves.

#include <memory>
#include <vector>

#include "titan/train/trainer.h"

namespace titan::train {

using StatefulObjects = std::vector<std::unique_ptr<checkpoint::Stateful>>;

/// Objects over `parts` and `progress`, which have to live as long, and those of saved_objects(); added to
/// parts.checkpoints. For a seed checkpoint the model alone.
StatefulObjects add_trainer_state(TrainerParts& parts, Progress& progress, const TrainerOptions& options);

}  // namespace titan::train
