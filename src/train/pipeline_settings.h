#pragma once

// The keys of [parallelism] about pipelines.

#include "titan/train/parallel_dims.h"

namespace titan::train {

void describe_pipeline_parallel(config::Table<ParallelismSettings>& table);

}  // namespace titan::train
