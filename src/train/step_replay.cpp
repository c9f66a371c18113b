// [Note: whose number it was]
// One number goes its way through the ranks: forwards into the stages behind, and in the backward into those
// before; from a layer that adds up parts over ranks of a tensor-parallel axis or of one that shares rows into all of these. The rank
// that made it is the first that it meets: in a forward rather than a backward, there in the first stage and
// here in the last, and among ranks that call the same modules at the lowest count of calls. Of those that
// come to it in the same call, one that was given such a number says more than one that has it out of a sum.

#include "train/step_replay.h"

#include <iomanip>
#include <sstream>
#include <utility>

#include "titan/core/error.h"
#include "titan/dist/collectives.h"
#include "titan/train/nan_trace.h"

namespace titan::train {

namespace {

constexpr dist::Label kReplayLabel{"train::replay_step"};
constexpr int64_t kStages = 1'000'000;  // more than any pipeline has

std::string comma_separated(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += str(text.empty() ? "" : ", ", rank);
  return text;
}

// By which findings sort as the note says, as text.
std::string place_in_order(const NanFinding& finding, int64_t stage) {
  std::ostringstream key;
  key << finding.in_backward << std::setfill('0') << std::setw(7)
      << (finding.in_backward ? kStages - stage : stage) << std::setw(19) << finding.num_looked_at
      << finding.made_by_module;
  return key.str();
}

// A probe sees what comes out of such a sum, not this rank's part of it.
std::string who_adds_up(const Meshes& meshes) {
  std::string text;
  for (const auto& [mesh, kind] : {std::pair(&meshes.tp, "tensor"), std::pair(&meshes.rows, "row")})
    if (mesh->size() > 1)
      text += str("\n  ", kind, "-parallel ranks ", comma_separated(mesh->ranks()),
                  " exchange parts of such numbers: any of them may have made it");
  return text;
}

/// What the first ranks in order have to say.
struct Said {
  std::string text;
  std::vector<int> ranks;  // at the same place in it
};

/// `text`: "" where a rank has nothing to say. `key`: by which they are ordered, of fixed length.
Said gather_first(const dist::World& world, const std::string& key, const std::string& text) {
  const auto all = world.everyone()->all_gather_text(text.empty() ? "" : key + text, kReplayLabel);
  Said said;
  std::string first;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].empty()) continue;
    const std::string its_key = all[rank].substr(0, key.size());
    if (!said.ranks.empty() && its_key > first) continue;
    if (said.ranks.empty() || its_key < first) said = {all[rank].substr(key.size()), {}};
    first = its_key;
    said.ranks.push_back(static_cast<int>(rank));
  }
  return said;
}

std::string first_nonfinite_gradient(const std::vector<Parameter>& parameters) {
  for (const Parameter& parameter : parameters)
    if (!is_finite(parameter.data.local.grad())) return parameter.name;
  return "";
}

}  // namespace

std::string replay_step(const dist::World& world, const Meshes& meshes, const std::vector<Stage>& stages,
                        const std::vector<Parameter>& parameters, int64_t step,
                        const std::function<at::Tensor()>& run_again) {
  std::vector<nn::AnyRef> models;
  for (const Stage& stage : stages) models.push_back(stage.model->root());
  NanTrace trace(models, world.rank(), NanTrace::OnFinding::Note);
  trace.set_step(step);
  const bool loss_is_finite = is_finite(run_again());

  const NanFinding mine = trace.first().value_or(NanFinding{});
  Said said = gather_first(world, place_in_order(mine, stages.at(mine.model).index),
                           mine.text.empty() ? "" : mine.text + who_adds_up(meshes));
  if (!said.ranks.empty())
    return str("Run again, it shows where. ", said.text,
               said.ranks.size() == 1
                   ? ""
                   : str("\n  ranks ", comma_separated(said.ranks), " come to such numbers there"));
  said = gather_first(world, "", first_nonfinite_gradient(parameters));
  if (!said.ranks.empty())
    return str(
        "Run again, no module on any rank gives an output or a gradient that isn't finite, but the "
        "gradient of parameter '",
        said.text, "' is: it comes from the parameter's own, or from its sum over ranks");
  said = gather_first(world, "", loss_is_finite ? "" : "not finite");
  if (!said.ranks.empty())
    return str("Run again, it is the loss alone, on ranks ", comma_separated(said.ranks),
               ": every module's output and every gradient is finite");
  return "Run again, all of its numbers are finite, with the same batch and weights. Suspect an operation "
         "that "
         "isn't deterministic, random numbers that differ (dropout), or a host's processor or memory";
}

}  // namespace titan::train
