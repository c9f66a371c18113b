#pragma once

// A model's weights in one safetensors file with TorchTitan's names: what checkpoint.initial_load_path takes
// and the last step writes.

#include <filesystem>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "titan/parallel/parameters.h"

namespace titan {

/// Copies this rank's part of every parameter out of the file (not collective: each rank reads only its own
/// boxes), converting to the parameter's dtype. The names must be the same on both sides. Throws ConfigError
/// that lists all missing and unexpected names and shape mismatches at once; then no parameter was changed.
/// Parameters must be materialized.
void load_model(const std::vector<Parameter>& parameters, const std::filesystem::path& path);

/// Writes all parameters, cast to `export_dtype` (default: each its own), as one file. Collective over the
/// parameters' meshes: each tensor is gathered in turn, and rank 0 of the largest mesh writes it. The file
/// appears by one rename. When rank 0 can't write, every rank throws Error.
void save_model(const std::vector<Parameter>& parameters, const std::filesystem::path& path,
                std::optional<at::ScalarType> export_dtype = std::nullopt);

}  // namespace titan
