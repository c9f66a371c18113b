#pragma once

// Llama 3 as a Hugging Face folder holds it.

#include "titan/checkpoint/hugging_face.h"
#include "titan/models/llama3_args.h"

namespace titan::models {

/// Names, rows and config.json of transformers' LlamaForCausalLM.
HfModel hugging_face_model(const Llama3Args& args);
/// The sizes in a config.json. Throws ConfigError with all that is missing, wrong or not implemented.
Llama3Args args_of_hugging_face(const HfConfig& config);

}  // namespace titan::models
