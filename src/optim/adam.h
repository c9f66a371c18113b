#pragma once

#include "titan/optim/optimizer.h"

namespace titan::optim {

/// "AdamW" and "Adam" of optimizers().
OptimizerSpec adamw();
OptimizerSpec adam();

}  // namespace titan::optim
