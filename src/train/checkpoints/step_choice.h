#pragma once

// The step of its folder that a run resumes from: rank 0 looks, and tells all ranks.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "titan/dist/collectives.h"
#include "titan/dist/world.h"

namespace titan::train {

struct StepChoice {
  std::optional<int64_t> step = {};           ///< unset: there is none
  std::vector<std::string> passed_over = {};  ///< why newer steps aren't used, a line each
  std::string error = {};                     ///< about a step that was asked for; else empty
  static void fields(auto& wire, auto& self) { wire(self.step, self.passed_over, self.error); }
};

/// The newest sound step before `before`, as far as that can be seen without reading its tensors. A step
/// whose numbers aren't all finite is passed over if there is an older one whose numbers are. `counts`: which
/// steps may be chosen; unset: all.
StepChoice choose_newest(const std::filesystem::path& folder, int64_t before,
                         const std::function<bool(int64_t step)>& counts = {});
/// The step that was asked for.
StepChoice choose_step(const std::filesystem::path& folder, int64_t wanted);

/// The newest step of all, even if it holds the model alone; unset if it isn't sound.
std::optional<int64_t> last_step_in(const std::filesystem::path& folder);

/// The damage inside the files. Reads all of them, each on one rank. Collective over the world.
std::vector<std::string> find_damage(const std::filesystem::path& step_folder, const dist::World& world);

/// The part of a manifest that decides how its step is loaded.
struct ManifestSummary {
  int64_t step = 0;
  std::string rng_place;  ///< RngState::place; empty: generators weren't saved
  static void fields(auto& wire, auto& self) { wire(self.step, self.rng_place); }
};
/// Rank 0 reads it; if it can't, every rank throws Error. Collective over the world.
ManifestSummary read_summary(const std::filesystem::path& step_folder, const dist::World& world);

/// What `part` returns on rank 0, on all ranks; what it throws there, every rank throws as Error. Collective over
/// the world.
std::string from_rank_0(const dist::World& world, dist::Label label,
                        const std::function<std::string()>& part);
/// The same for a choice.
StepChoice choose_on_rank_0(const dist::World& world, const std::function<StepChoice()>& choose);

}  // namespace titan::train
