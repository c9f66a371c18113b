#pragma once

// The model in a Hugging Face folder, as a family understands it.

#include <filesystem>

#include "titan/checkpoint/hugging_face.h"
#include "titan/train/model_spec.h"

namespace titan::train {

/// Reads the folder's config.json. Throws ConfigError that names the file and everything in it that is
/// missing, wrong, or not this family's.
HfModel hf_model_of_folder(const ModelSpec& spec, const std::filesystem::path& folder);

}  // namespace titan::train
