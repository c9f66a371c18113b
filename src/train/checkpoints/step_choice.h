#pragma once

// Which step of its folder a run goes on behind: rank 0 looks, all ranks hear.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "titan/dist/world.h"

namespace titan::train {

struct StepChoice {
  std::optional<int64_t> step = {};           ///< unset: there is none to go on from
  std::vector<std::string> passed_over = {};  ///< what keeps newer steps from it, a line each
  std::string error = {};                     ///< of a step that was asked for; else empty
  std::string failure = {};                   ///< why nobody could look; else empty
};

/// The newest step before `before` that nothing is found to be wrong with, without reading its tensors. One
/// whose numbers aren't all finite is passed over where there is an older one whose are.
/// Of those alone that `counts` is true of; unset: of all.
StepChoice choose_newest(const std::filesystem::path& folder, int64_t before,
                         const std::function<bool(int64_t step)>& counts = {});
/// The step that was asked for.
StepChoice choose_step(const std::filesystem::path& folder, int64_t wanted);

/// The newest step of all, be it a model alone, unless something is found to be wrong with it.
std::optional<int64_t> last_step_in(const std::filesystem::path& folder);

/// What is wrong inside of the files, all of which are read, each by one rank. Collective over the world.
std::vector<std::string> find_damage(const std::filesystem::path& step_folder, const dist::World& world);

/// What a manifest says that decides how its step is loaded.
struct ManifestSummary {
  int64_t step = 0;
  std::string rng_place;  ///< RngState::place; empty: generators weren't saved
};
/// As rank 0 reads it; where it can't, every rank throws Error. Collective over the world.
ManifestSummary read_summary(const std::filesystem::path& step_folder, const dist::World& world);

/// Rank 0's; throws its failure on all ranks. Collective over the world.
StepChoice share(const StepChoice& choice, const dist::World& world);

}  // namespace titan::train
