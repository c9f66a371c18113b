#pragma once

// Llama 3 as the trainer knows it.

#include "titan/checkpoint/hugging_face.h"
#include "titan/models/llama3.h"
#include "titan/models/register_llama3.h"
#include "titan/train/model_spec.h"

namespace titan::models {

/// Which module is cut how over a tensor-parallel axis: TorchTitan's plan for Llama 3.
TensorPlan llama3_tp_plan(const TensorParallelOptions& options = {});

/// The recipe: which modules form a sharding group, and which of them are freed between forward and backward.
void parallelize_llama3(const Llama3& model, const train::ParallelPlan& plan);

/// Names, rows and config.json of transformers' LlamaForCausalLM.
HfModel hugging_face_model(const Llama3Args& args);
/// The sizes in a config.json. Throws ConfigError with all that is missing, wrong or not implemented.
Llama3Args args_of_hugging_face(const HfConfig& config);

}  // namespace titan::models
