#pragma once

// Llama 3 as the trainer knows it.

#include "titan/models/llama3.h"
#include "titan/models/llama3_hugging_face.h"
#include "titan/models/register_llama3.h"
#include "titan/train/model_spec.h"

namespace titan::models {

/// Which module is cut how over a tensor-parallel axis: TorchTitan's plan for Llama 3.
TensorPlan llama3_tp_plan(const TensorParallelOptions& options = {});

/// The recipe: which modules form a sharding group, and which of them are freed between forward and backward.
void parallelize_llama3(const Llama3& model, const train::ParallelPlan& plan);

}  // namespace titan::models
