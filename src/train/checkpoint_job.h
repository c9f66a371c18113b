#pragma once

// What a job's settings make of checkpoints.

#include <memory>
#include <vector>

#include "titan/dist/world.h"
#include "titan/train/job_config.h"
#include "titan/train/run_checkpoints.h"

namespace titan::train {

/// What checkpoint.initial_load_path is.
enum class InitialKind { None, Nothing, ModelFile, Step, HuggingFace };
struct InitialSource {
  InitialKind kind = InitialKind::None;
  std::filesystem::path path;  ///< of the file, or the folder
};
/// Looks at the files; Nothing: there is none of what it may be.
InitialSource initial_source(const JobConfig& config);

/// Whether the run's folder holds its last step: then it has come to its end, which is logged, unless the
/// settings ask for a step before. Collective over the world.
bool run_has_ended(const JobConfig& config, const dist::World& world);

/// Null where checkpoints are off. Collective over the world.
std::unique_ptr<RunCheckpoints> build_checkpoints(const JobConfig& config, const dist::World& world,
                                                  const Meshes& meshes,
                                                  const std::vector<Parameter>& parameters);

}  // namespace titan::train
