#pragma once

// Checkpoints of a job, from its settings: the initial weights, the run's own states, and Hugging Face
// folders.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "job/job_config.h"
#include "titan/checkpoint/hugging_face.h"
#include "titan/dist/world.h"
#include "train/checkpoints/run_checkpoints.h"

namespace titan::train {

/// Throws ConfigError with every difference between a folder's config.json and the configured model.
void check_hf_config(const JobConfig& config, const std::filesystem::path& folder);

/// The kinds of initial weights.
enum class InitialKind { None, Nothing, ModelFile, Step, HuggingFace };
struct InitialSource {
  InitialKind kind = InitialKind::None;
  /// The file, or the folder: for Hugging Face's initial_load_path, or else model.hf_assets_path.
  std::filesystem::path path;
};
/// Looks at the files. Nothing: the path holds none of the other kinds.
InitialSource initial_source(const JobConfig& config);

/// The step with which the run is complete, if its folder holds that and the settings don't ask for an
/// earlier one. Looks from this process alone.
std::optional<int64_t> end_of_run(const JobConfig& config);
/// Whether there is one, as rank 0 sees it; if so, logs it. Collective over the world.
bool run_has_ended(const JobConfig& config, const dist::World& world);

/// Null where checkpoints are off. Collective over the world.
std::unique_ptr<RunCheckpoints> build_checkpoints(const JobConfig& config, const dist::World& world,
                                                  const Meshes& meshes,
                                                  const std::vector<Parameter>& parameters);

}  // namespace titan::train
