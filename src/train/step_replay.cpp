#include "train/step_replay.h"

#include <limits>

#include "titan/core/error.h"
#include "titan/dist/collectives.h"
#include "titan/train/nan_trace.h"

namespace titan::train {

namespace {

constexpr dist::Label kReplayLabel{"train::replay_step"};

/// What ranks have to say, and who they are; the first of them counts.
struct Said {
  std::string first;
  std::string ranks;  // "0, 3"
  int count = 0;
};

Said gather(const dist::World& world, const std::string& mine) {
  Said said;
  const auto texts = world.everyone()->all_gather_text(mine, kReplayLabel);
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    if (texts[rank].empty()) continue;
    if (said.count++ == 0) said.first = texts[rank];
    said.ranks += str(said.ranks.empty() ? "" : ", ", rank);
  }
  return said;
}

/// Of the ranks that had it first. A sum over a tensor-parallel group hands it to the others, whose modules
/// then made it of finite numbers as well, but later ones.
Said gather_earliest(const dist::World& world, const NanFinding* mine) {
  const double when = mine ? static_cast<double>(mine->num_looked_at) : std::numeric_limits<double>::max();
  const double earliest = -world.everyone()->max(-when, kReplayLabel);
  return gather(world, mine && when == earliest ? mine->text : "");
}

std::string first_nonfinite_gradient(const std::vector<Parameter>& parameters) {
  for (const Parameter& parameter : parameters) {
    const at::Tensor& gradient = parameter.data.local.grad();
    if (!is_finite(gradient)) return parameter.name;
  }
  return "";
}

}  // namespace

// A module's finding comes first, though it be of a higher rank: what a rank was given another has made.
std::string replay_step(const dist::World& world, const std::vector<nn::AnyRef>& models,
                        const std::vector<Parameter>& parameters, int64_t step,
                        const std::function<void()>& run_again) {
  NanTrace trace(models, world.rank(), NanTrace::OnFinding::Note);
  trace.set_step(step);
  run_again();
  const auto mine = trace.first();
  for (const bool made_by_module : {true, false}) {
    const Said said =
        gather_earliest(world, mine && mine->made_by_module == made_by_module ? &*mine : nullptr);
    if (said.count == 0) continue;
    return str("Run again, it shows where. ", said.first,
               said.count == 1 ? "" : str("\n  so say ranks ", said.ranks));
  }
  const Said said = gather(world, first_nonfinite_gradient(parameters));
  if (said.count > 0)
    return str(
        "Run again, no module on any rank gives an output or a gradient that isn't finite, but the "
        "gradient of parameter '",
        said.first, "' is: it comes from the parameter's own, or from its sum over ranks");
  return "Run again, all of its numbers are finite: neither the batch nor the model explains it. Suspect an "
         "operation that isn't deterministic, or a host's processor or memory";
}

}  // namespace titan::train
