#pragma once

// A model's weights in and out of Hugging Face's form: into the shards of any mesh, out of them, and from
// file to file, or from a saved state, without a model.

#include <filesystem>
#include <functional>
#include <optional>
#include <vector>

#include "titan/checkpoint/hf_folder.h"
#include "titan/checkpoint/saved_state.h"
#include "titan/parallel/parameters.h"

namespace titan {

/// Copies this rank's part of every parameter out of the folder (each rank reads only its own rows),
/// converting to the parameter's dtype; config.json isn't looked at. Throws ConfigError that lists all
/// missing and additional tensors and shape mismatches at once; then no parameter was changed. `parameters`
/// may be a stage of `model`, and must be materialized.
void load_hf_model(const std::vector<Parameter>& parameters, const HfModel& model,
                   const std::filesystem::path& folder);

/// Writes all parameters, cast to `export_dtype` (default: each its own), as a folder (write_hf_folder).
/// Collective as save_model, one tensor at a time. When it can't be written, every rank throws Error.
void save_hf_model(const std::vector<Parameter>& parameters, const HfModel& model,
                   const std::filesystem::path& folder, const HfWriteOptions& options,
                   std::optional<at::ScalarType> export_dtype = std::nullopt,
                   const DeviceMesh& pipeline = {});

struct ConvertOptions {
  std::optional<at::ScalarType> dtype;  ///< of all tensors; unset: each as it is
  HfWriteOptions folder;                ///< of the folder that is written
  std::function<void(int64_t bytes, int64_t total)> progress = [](int64_t, int64_t) {};  ///< written so far
};

// They read and write 16 MiB at a time, so that memory doesn't depend on the model's size, and throw
// ConfigError where the source isn't `model`'s weights.

/// A folder's weights as one file with our names.
void convert_from_hf(const std::filesystem::path& folder, const std::filesystem::path& file,
                     const HfModel& model, const ConvertOptions& options = {});
/// The one file as a folder.
void convert_to_hf(const std::filesystem::path& file, const std::filesystem::path& folder,
                   const HfModel& model, const ConvertOptions& options = {});
/// The model of a saved state, whatever ranks saved it (its tensors "model.NAME", each under NAME), as one
/// file: the bytes that save_model writes of it.
void convert_state(const checkpoint::SavedState& state, const std::filesystem::path& file,
                   const ConvertOptions& options = {});
/// The same as a folder.
void convert_state_to_hf(const checkpoint::SavedState& state, const std::filesystem::path& folder,
                         const HfModel& model, const ConvertOptions& options = {});

}  // namespace titan
