#include "train/checkpoints/step_choice.h"

#include <algorithm>
#include <cstring>

#include <ATen/ops/empty.h>
#include <nlohmann/json.hpp>

#include "checkpoint/format/rank_file.h"
#include "core/json.h"
#include "titan/checkpoint/step_folder.h"
#include "titan/checkpoint/storage.h"
#include "titan/core/error.h"
#include "titan/dist/collectives.h"
#include "train/checkpoints/run_checkpoints.h"

namespace titan::train {

namespace {

namespace fs = std::filesystem;

constexpr dist::Label kChoiceLabel{"train::step_choice"};

bool holds_model_alone(const fs::path& step_folder) {
  std::error_code ignored;
  const auto has = [&](const char* name) { return fs::exists(step_folder / name, ignored); };
  return !has(checkpoint::kManifestName) && (has(kModelFile) || has("config.json"));
}

std::vector<std::string> problems_with(const fs::path& step_folder) {
  if (checkpoint::storage_of(step_folder).status(step_folder).kind == checkpoint::Storage::Kind::Nothing)
    return {"there is no " + step_folder.string()};
  if (holds_model_alone(step_folder))
    return {step_folder.string() + " holds a model alone, for checkpoint.initial_load_path"};
  return checkpoint::quick_problems(step_folder);
}

std::string complete_steps(const fs::path& folder) {
  std::string steps;
  for (const checkpoint::StepEntry& entry : checkpoint::list_steps(folder))
    if (problems_with(entry.path).empty()) steps += str(steps.empty() ? "" : ", ", entry.step);
  return steps.empty() ? "there is no complete step" : "there are the complete steps " + steps;
}

// Names of files may not be UTF-8.
std::string dump(const nlohmann::json& tree) {
  return tree.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

// Gives rank 0's text to all ranks.
std::string share_text(const std::string& text, const dist::World& world) {
  if (world.size() == 1) return text;
  const auto group = world.everyone();
  const bool is_first = world.rank() == 0;
  const int64_t length = group->sum(static_cast<int64_t>(is_first ? text.size() : 0), kChoiceLabel);
  at::Tensor bytes = at::empty({length}, at::kByte);
  if (is_first) std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
  group->broadcast(bytes, 0, kChoiceLabel).wait();
  return {static_cast<const char*>(bytes.const_data_ptr()), static_cast<size_t>(length)};
}

std::string to_text(const StepChoice& choice) {
  nlohmann::json tree;
  tree["step"] = choice.step.value_or(-1);
  tree["passed_over"] = choice.passed_over;
  tree["error"] = choice.error;
  tree["failure"] = choice.failure;
  return dump(tree);
}

nlohmann::json parse_shared(const std::string& text) {
  std::string problem;
  nlohmann::json tree = parse_json(text, &problem);
  if (!problem.empty()) throw Error("cannot read what rank 0 sent about the step to load: " + problem);
  return tree;
}

StepChoice from_text(const std::string& text) {
  const auto tree = parse_shared(text);
  StepChoice choice;
  if (const int64_t step = tree.at("step"); step >= 0) choice.step = step;
  tree.at("passed_over").get_to(choice.passed_over);
  tree.at("error").get_to(choice.error);
  tree.at("failure").get_to(choice.failure);
  return choice;
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
      if (!not_finite) not_finite = StepChoice{.step = entry->step, .passed_over = choice.passed_over};
      problems = {entry->path.string() +
                  ": not all of its numbers are finite (checkpoint.load_step loads it nevertheless)"};
    }
    if (problems.empty()) choice.step = entry->step;
    choice.passed_over.insert(choice.passed_over.end(), problems.begin(), problems.end());
  }
  return !choice.step && not_finite ? *not_finite : choice;
}

std::optional<int64_t> last_step_in(const fs::path& folder) {
  const std::vector<checkpoint::StepEntry> entries = checkpoint::list_steps(folder);
  if (entries.empty()) return std::nullopt;
  const fs::path& newest = entries.back().path;
  const bool is_whole = holds_model_alone(newest) || problems_with(newest).empty();
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
  std::string mine;
  try {
    const checkpoint::Manifest manifest = checkpoint::read_manifest(step_folder);
    const auto num_files = static_cast<int64_t>(manifest.files.size());
    for (int64_t rank = world.rank(); rank < num_files; rank += world.size()) {
      const checkpoint::FileIdentity identity{manifest.run_id, manifest.step, rank, num_files};
      checkpoint::RankFile(step_folder / checkpoint::file_name(rank), identity,
                           manifest.files[static_cast<size_t>(rank)])
          .verify();
    }
  } catch (const Error& error) {
    mine = error.what();
  }
  std::vector<std::string> damages;
  for (const std::string& damage : world.everyone()->all_gather_text(mine, kChoiceLabel))
    if (!damage.empty() && std::find(damages.begin(), damages.end(), damage) == damages.end())
      damages.push_back(damage);
  return damages;
}

StepChoice share(const StepChoice& choice, const dist::World& world) {
  const StepChoice shared =
      world.size() == 1 ? choice : from_text(share_text(world.rank() == 0 ? to_text(choice) : "", world));
  if (!shared.failure.empty()) throw Error(shared.failure);
  return shared;
}

ManifestSummary read_summary(const fs::path& step_folder, const dist::World& world) {
  nlohmann::json tree = nlohmann::json::object();
  if (world.rank() == 0) {
    try {
      const checkpoint::Manifest manifest = checkpoint::read_manifest(step_folder);
      const auto place = manifest.texts.find("rng");
      tree = {{"step", manifest.step}, {"rng", place == manifest.texts.end() ? "" : place->second}};
    } catch (const Error& error) {
      tree = {{"error", error.what()}};
    }
  }
  tree = parse_shared(share_text(dump(tree), world));
  if (tree.contains("error")) throw Error(tree["error"].get<std::string>());
  return {tree.at("step"), tree.at("rng")};
}

}  // namespace titan::train
