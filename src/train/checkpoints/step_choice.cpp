// Chooses the step to resume from: the newest complete one, or the one that was asked for.

#include "train/checkpoints/run_checkpoints.h"

#include <algorithm>

#include "checkpoint/format/rank_file.h"
#include "checkpoint/format/stored_files.h"
#include "checkpoint/save/rank_tree.h"
#include "core/json.h"
#include "titan/checkpoint/hugging_face.h"
#include "titan/checkpoint/step_folder.h"
#include "titan/checkpoint/storage.h"
#include "titan/core/error.h"

namespace titan::train {

namespace {

namespace fs = std::filesystem;
using checkpoint::holds_model_alone;
using checkpoint::detail::from_rank_0;
using checkpoint::detail::from_wire;
using checkpoint::detail::problem_of;
using checkpoint::detail::to_wire;

constexpr dist::Label kChoiceLabel{"train::step_choice"};

// Damage that the headers, sizes and digests of a model's files show.
std::string model_damage(const fs::path& step_folder) {
  return problem_of([&] {
    const HfFolder weights(step_folder);
    if (!fs::exists(step_folder / checkpoint::kModelManifestName)) return;
    // People may change the text files of their model, but don't remove them.
    for (const auto& [name, digest] : checkpoint::read_model_manifest(step_folder).texts)
      if (name != checkpoint::detail::kModelForm && !fs::exists(step_folder / name))
        throw Error(str((step_folder / name).string(), " is missing"));
  });
}

std::vector<std::string> problems_with(const fs::path& step_folder) {
  if (checkpoint::storage_of(step_folder).status(step_folder).kind == checkpoint::Storage::Kind::Nothing)
    return {"there is no " + step_folder.string()};
  if (holds_model_alone(step_folder))
    return {step_folder.string() + " holds only a model, for checkpoint.initial_load_path"};
  return checkpoint::quick_problems(step_folder);
}

std::string complete_steps(const fs::path& folder) {
  std::string steps;
  for (const checkpoint::StepEntry& entry : checkpoint::list_steps(folder))
    if (problems_with(entry.path).empty()) steps += str(steps.empty() ? "" : ", ", entry.step);
  return steps.empty() ? "there is no complete step" : "there are the complete steps " + steps;
}

}  // namespace

// A step whose numbers overflowed would fail again after each start.
StepChoice choose_newest(const fs::path& folder, int64_t before, const std::function<bool(int64_t)>& counts) {
  StepChoice choice;
  std::optional<StepChoice> not_finite;
  const std::vector<checkpoint::StepEntry> entries = checkpoint::list_steps(folder);
  for (auto entry = entries.rbegin(); entry != entries.rend() && !choice.step; ++entry) {
    if (entry->step >= before || (counts && !counts(entry->step))) continue;
    std::vector<std::string> problems = problems_with(entry->path);
    if (problems.empty() && !checkpoint::read_manifest(entry->path).finite) {
      if (!not_finite) not_finite = StepChoice{.step = entry->step, .skipped = choice.skipped};
      problems = {entry->path.string() +
                  ": not all of its numbers are finite (checkpoint.load_step loads it anyway)"};
    }
    if (problems.empty())
      choice.step = entry->step;
    else if (!holds_model_alone(entry->path))
      choice.is_damaged = true;
    else if (std::string damage = model_damage(entry->path); !damage.empty()) {
      choice.is_damaged = true;
      problems = {std::move(damage)};
    }
    choice.skipped.insert(choice.skipped.end(), problems.begin(), problems.end());
  }
  return !choice.step && not_finite ? *not_finite : choice;
}

std::optional<int64_t> last_step_in(const fs::path& folder) {
  const std::vector<checkpoint::StepEntry> entries = checkpoint::list_steps(folder);
  if (entries.empty()) return std::nullopt;
  const fs::path& newest = entries.back().path;
  const bool is_whole =
      holds_model_alone(newest) ? model_damage(newest).empty() : problems_with(newest).empty();
  return is_whole ? std::optional(entries.back().step) : std::nullopt;
}

StepChoice choose_step(const fs::path& folder, int64_t wanted) {
  const fs::path step_folder = checkpoint::step_path(folder, wanted);
  const std::vector<std::string> problems = problems_with(step_folder);
  if (problems.empty()) return {.step = wanted};
  std::string text;
  for (const std::string& problem : problems) text += problem + "; ";
  return {.error = str("checkpoint.load_step = ", wanted, ": ", text, "in ", folder.string(), " ",
                       complete_steps(folder))};
}

std::vector<std::string> find_damage(const fs::path& step_folder, const dist::World& world) {
  const std::string mine = problem_of([&] {
    const checkpoint::Manifest manifest = checkpoint::read_manifest(step_folder);
    const auto num_files = static_cast<int64_t>(manifest.files.size());
    for (int64_t rank = world.rank(); rank < num_files; rank += world.size()) {
      const checkpoint::FileIdentity identity{manifest.run_id, manifest.step, rank, num_files};
      checkpoint::RankFile(step_folder / checkpoint::file_name(rank), identity,
                           manifest.files[static_cast<size_t>(rank)])
          .verify();
    }
  });
  std::vector<std::string> damages;
  for (const std::string& damage : world.everyone()->all_gather_text(mine, kChoiceLabel))
    if (!damage.empty() && std::find(damages.begin(), damages.end(), damage) == damages.end())
      damages.push_back(damage);
  return damages;
}

StepChoice choose_on_rank_0(const dist::World& world, const std::function<StepChoice()>& choose) {
  return from_wire<StepChoice>(from_rank_0(world, kChoiceLabel, [&] { return to_wire(choose()); }));
}

ManifestSummary read_summary(const fs::path& step_folder, const dist::World& world) {
  return from_wire<ManifestSummary>(from_rank_0(world, kChoiceLabel, [&] {
    const checkpoint::Manifest manifest = checkpoint::read_manifest(step_folder);
    const auto place = manifest.texts.find("rng");
    return to_wire(
        ManifestSummary{manifest.step, place == manifest.texts.end() ? "" : place->second, manifest.config});
  }));
}

}  // namespace titan::train
