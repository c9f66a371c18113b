// [Note: which rank made the number]
// A number that isn't finite travels through the ranks: in the forward to later stages, in the backward to
// earlier ones, and from a layer that sums parts over tensor-parallel ranks, or over ranks that share rows, to all of these. The
// rank that made it meets it first: in a forward rather than a backward; there in the first stage, here in
// the last; and among ranks that call the same modules, at the lowest count of calls. Among ranks that meet
// it in the same call, one that was given the number says more than one that got it out of a sum.

#include "guard/policies.h"

#include <exception>
#include <iomanip>
#include <sstream>
#include <utility>

#include <ATen/core/grad_mode.h>

#include "titan/core/error.h"
#include "titan/core/log.h"
#include "titan/dist/collectives.h"
#include "titan/guard/nan_search.h"
#include "titan/train/trainer.h"
#include "train/step_runner.h"

namespace titan::train {

namespace {

constexpr dist::Label kReplayLabel{"train::replay_step"};
constexpr int64_t kStages = 1'000'000;  // more than any pipeline has

std::string comma_separated(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += str(text.empty() ? "" : ", ", rank);
  return text;
}

// A text by which findings sort as the note says.
std::string place_in_order(const NanFinding& finding, int64_t stage) {
  std::ostringstream key;
  key << finding.in_backward << std::setfill('0') << std::setw(7)
      << (finding.in_backward ? kStages - stage : stage) << std::setw(19) << finding.num_looked_at
      << finding.made_by_module;
  return key.str();
}

// A probe sees the result of such a sum, not this rank's part of it.
std::string who_adds_up(const Meshes& meshes) {
  std::string text;
  const auto add = [&](const std::string& kind, const DeviceMesh& mesh) {
    if (mesh.size() > 1)
      text += str("\n  ", kind, "-parallel ranks ", comma_separated(mesh.ranks()),
                  " exchange parts of such numbers: any of them may have made it");
  };
  add("tensor", meshes.tp);
  for (const RowMesh& axis : meshes.row_axes) add(axis.kind, axis.mesh);
  return text;
}

/// The text of the ranks that come first in an order.
struct Said {
  std::string text;
  std::vector<int> ranks;  // that come first
};

/// `text`: "" if a rank has nothing to say. `key`: the texts' order, of the same length on all ranks.
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

}  // namespace

// Logs the known facts first, in case the replay does not finish.
std::string NanReplay::explain(Trainer& trainer, const NonFiniteStep& step) {
  log::warning_rank0(step.problem +
                     ". The step is run again to find the module and the rank that it comes from");
  const at::AutoGradMode with_gradients(true);  // off where numbers are read late
  try {
    return replay(trainer, step);
  } catch (const std::exception& error) {
    return "Run again to find where it comes from, the step failed: " + reason_of(error);
  }
}

std::string NanReplay::replay(Trainer& trainer, const NonFiniteStep& step) {
  const TrainerParts& parts = trainer.parts();
  const dist::World& world = parts.world;
  const std::vector<ModelPart>& models = parts.runner->models();
  std::vector<nn::AnyRef> roots;
  for (const ModelPart& part : models) roots.push_back(part.model->root());
  NanSearch search(roots, {.rank = world.rank(), .on_finding = NanSearch::OnFinding::Note});
  search.set_step(step.values.step);
  trainer.parts().optimizer.zero_grad();
  const bool loss_is_finite = is_finite(trainer.forward_backward(step.input));
  const NanFinding mine = search.first().value_or(NanFinding{});
  Said said = gather_first(world, place_in_order(mine, models.at(mine.model).index),
                           mine.text.empty() ? "" : mine.text + who_adds_up(parts.meshes));
  if (!said.ranks.empty())
    return str("Run again, it shows where. ", said.text,
               said.ranks.size() == 1
                   ? ""
                   : str("\n  ranks ", comma_separated(said.ranks), " come to such numbers there"));
  const Parameter* nonfinite = first_nonfinite_gradient(parts.parameters);
  said = gather_first(world, "", nonfinite ? nonfinite->name : "");
  if (!said.ranks.empty())
    return str(
        "Run again, no module on any rank gives an output or a gradient that isn't finite, but the gradient "
        "of "
        "parameter '",
        said.text, "' is: it comes from the parameter's own, or from its sum over ranks");
  said = gather_first(world, "", loss_is_finite ? "" : "not finite");
  if (!said.ranks.empty())
    return str("Run again, it is the loss alone, on ranks ", comma_separated(said.ranks),
               ": every module's output and every gradient is finite");
  return "Run again, all of its numbers are finite, with the same batch and weights. Suspect an operation "
         "that isn't "
         "deterministic, random numbers that differ (dropout), or a host's processor or memory";
}

}  // namespace titan::train
