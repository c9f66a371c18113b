// titan checkpoint ls: a run's steps and their health.

#include <cstdio>

#include <nlohmann/json.hpp>

#include "cli/checkpoint/commands.h"
#include "cli/text.h"
#include "titan/checkpoint/step_folder.h"
#include "titan/core/error.h"

namespace titan::cli {

namespace {

namespace fs = std::filesystem;
using namespace checkpoint;
using Json = nlohmann::ordered_json;

struct StepHealth {
  StepEntry entry;
  std::optional<Manifest> manifest;  // what reads well
  bool model_only = false;
  std::vector<std::string> problems;  // none: complete, or a model
  int64_t num_bytes = 0;
  int64_t num_files = 0;
};

// What lies there, whatever the manifest says. A run may be removing it.
void count_files(StepHealth& health) {
  std::error_code gone;
  for (fs::directory_iterator entry(health.entry.path, gone); !gone && entry != fs::directory_iterator();
       entry.increment(gone)) {
    std::error_code ignored;
    if (entry->is_symlink(ignored) || !entry->is_regular_file(ignored)) continue;
    const auto num_bytes = entry->file_size(ignored);
    if (ignored) continue;
    ++health.num_files;
    health.num_bytes += static_cast<int64_t>(num_bytes);
  }
}

StepHealth examine(const StepEntry& entry) {
  StepHealth health;
  health.entry = entry;
  count_files(health);
  health.model_only = holds_model_only(entry.path);
  if (health.model_only) return health;
  try {
    if (entry.has_manifest) health.manifest = read_manifest(entry.path);
    health.problems =
        health.manifest ? quick_problems(entry.path, *health.manifest) : quick_problems(entry.path);
  } catch (const Error& error) {
    health.problems = {error.what()};
  }
  return health;
}

const char* state_word(const StepHealth& health) {
  if (health.model_only) return "model only";
  return health.problems.empty() ? "complete" : "damaged";
}

// In one line: the rest of the problems is verify's.
std::string state_text(const StepHealth& health) {
  std::string text = state_word(health);
  if (health.manifest && !health.manifest->finite) text += ", not all finite";
  if (health.problems.empty()) return text;
  text += ": " + health.problems.front();
  if (health.problems.size() > 1) text += str(" (and ", health.problems.size() - 1, " more)");
  return text;
}

fs::path dated_file(const StepHealth& health) {
  return health.entry.has_manifest ? health.entry.path / kManifestName : health.entry.path;
}

std::string table_of(const std::vector<StepHealth>& steps) {
  TextTable table{.rows = {{"step", "size", "files", "tensors", "written", "library", "state"}},
                  .right = {true, true, true, true}};
  for (const StepHealth& health : steps) {
    const auto& manifest = health.manifest;
    table.rows.push_back(
        {std::to_string(health.entry.step), size_text(health.num_bytes), std::to_string(health.num_files),
         manifest ? std::to_string(manifest->table.tensors().size()) : "-", written_text(dated_file(health)),
         manifest ? manifest->library : "-", state_text(health)});
  }
  return to_string(table);
}

Json json_of(const StepHealth& health) {
  Json step = {{"step", health.entry.step},
               {"path", health.entry.path.string()},
               {"state", state_word(health)},
               {"problems", health.problems},
               {"bytes", health.num_bytes},
               {"files", health.num_files},
               {"written", written_text(dated_file(health), /*utc=*/true)}};
  if (!health.manifest) return step;
  step["tensors"] = health.manifest->table.tensors().size();
  step["run_id"] = health.manifest->run_id;
  step["library"] = health.manifest->library;
  step["finite"] = health.manifest->finite;
  return step;
}

const char* meaning_of(LeftoverKind kind) {
  switch (kind) {
    case LeftoverKind::Pending:
      return "being written, or left by a run that was killed";
    case LeftoverKind::Replaced:
      return "making way for another, or left by a run that was killed";
    case LeftoverKind::Removed:
      return "being removed, or left by a run that was killed";
  }
  return "";
}

std::string others_text(const fs::path& folder, const std::vector<Leftover>& leftovers) {
  std::string text;
  for (const fs::path& path : list_put_aside(folder))
    text += str(path.filename().string(), ": made way for what has its step's name now\n");
  for (const Leftover& leftover : leftovers)
    text += str(leftover.path.filename().string(), ": ", meaning_of(leftover.kind), "\n");
  return text;
}

std::string json_text(const fs::path& folder, const std::vector<StepHealth>& steps,
                      const std::vector<Leftover>& leftovers) {
  Json all = {{"folder", folder.string()},
              {"steps", Json::array()},
              {"leftovers", Json::array()},
              {"put_aside", Json::array()}};
  for (const StepHealth& health : steps) all["steps"].push_back(json_of(health));
  for (const Leftover& leftover : leftovers) all["leftovers"].push_back(leftover.path.string());
  for (const fs::path& path : list_put_aside(folder)) all["put_aside"].push_back(path.string());
  // A path may be any bytes.
  return all.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace

int checkpoint_ls(const Arguments& words) {
  const LsArguments arguments = parse_ls_arguments(words);
  if (!arguments.help.empty()) return print(arguments.help);
  const fs::path folder = steps_folder(arguments.folder, "ls");
  std::vector<StepHealth> steps;
  for (const StepEntry& entry : list_steps(folder)) {
    StepHealth health = examine(entry);
    if (fs::exists(entry.path)) steps.push_back(std::move(health));  // else a run has just removed it
  }
  const std::vector<Leftover> leftovers = list_leftovers(folder);
  const std::string text = arguments.json ? json_text(folder, steps, leftovers)
                           : steps.empty()
                               ? str("no steps in ", folder.string(), "\n", others_text(folder, leftovers))
                               : str(folder.string(), "\n", table_of(steps), others_text(folder, leftovers));
  return print(text);
}

}  // namespace titan::cli
