#pragma once

// A model's weights in one safetensors file with TorchTitan's names: what checkpoint.initial_load_path takes
// and the last step writes.

#include <filesystem>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "titan/parallel/parameters.h"

namespace titan {

/// Copies this rank's part of every parameter out of the file (each rank reads only its own boxes),
/// converting to the parameter's dtype. The names must be the same on both sides; with `pipeline`, those of
/// all its ranks together (collective over it then). Throws ConfigError that lists all missing and unexpected
/// names and shape mismatches at once; then no parameter was changed. Parameters must be materialized.
void load_model(const std::vector<Parameter>& parameters, const std::filesystem::path& path,
                const DeviceMesh& pipeline = {});

/// Writes all parameters, cast to `export_dtype` (default: each its own), as one file. Collective over the
/// parameters' meshes and `pipeline`, whose ranks hold other stages: each tensor is gathered in turn, comes
/// to the pipeline's rank 0, and rank 0 of the largest mesh (in a pipeline, of the world) writes it. A name
/// that several stages have (a tied matrix) is written once. The file appears by one rename. When it can't be
/// written, every rank throws Error.
void save_model(const std::vector<Parameter>& parameters, const std::filesystem::path& path,
                std::optional<at::ScalarType> export_dtype = std::nullopt, const DeviceMesh& pipeline = {});

}  // namespace titan
