#include "titan/checkpoint/step_folder.h"

#include <algorithm>
#include <charconv>
#include <iterator>
#include <string_view>
#include <utility>

#include "checkpoint/format/names.h"
#include "checkpoint/format/stored_files.h"
#include "titan/core/error.h"

namespace titan::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "step-";
constexpr std::pair<std::string_view, LeftoverKind> kSuffixes[] = {
    {".tmp", LeftoverKind::Pending}, {".replaced", LeftoverKind::Replaced}, {".old", LeftoverKind::Removed}};

// "7", but not "07", "+7" or a number above an int64_t's: each step has one name.
std::optional<int64_t> parse_step(std::string_view digits) {
  int64_t step = 0;
  const char* end = digits.data() + digits.size();
  const auto [stopped, error] = std::from_chars(digits.data(), end, step);
  const bool plain = error == std::errc() && stopped == end && step >= 0 && std::to_string(step) == digits;
  return plain ? std::optional(step) : std::nullopt;
}

std::optional<int64_t> step_of_name(std::string_view name) {
  if (!name.starts_with(kPrefix)) return std::nullopt;
  return parse_step(name.substr(kPrefix.size()));
}

// ".step-STEP.RUN" and one of the suffixes.
std::optional<Leftover> leftover_of_name(std::string_view name) {
  const auto suffix = std::find_if(std::begin(kSuffixes), std::end(kSuffixes),
                                   [&](const auto& known) { return name.ends_with(known.first); });
  if (!name.starts_with(".") || suffix == std::end(kSuffixes)) return std::nullopt;
  name.remove_suffix(suffix->first.size());
  if (name.empty()) return std::nullopt;
  name.remove_prefix(1);
  const size_t dot = name.find('.');
  const auto step = step_of_name(name.substr(0, dot));
  if (!step || dot == name.npos || dot + 1 == name.size()) return std::nullopt;
  return Leftover{
      .step = *step, .run_id = std::string(name.substr(dot + 1)), .path = {}, .kind = suffix->second};
}

// "step-STEP.model", "step-STEP.state.2"
bool is_put_aside(std::string_view name) {
  const size_t dot = name.find('.');
  if (dot == name.npos || !step_of_name(name.substr(0, dot))) return false;
  name.remove_prefix(dot);
  for (const std::string_view kind : {".model", ".state"})
    if (name == kind || (name.starts_with(kind) && name[kind.size()] == '.')) return true;
  return false;
}

std::vector<std::string> names_in(const fs::path& folder) { return storage_of(folder).list(folder); }

std::optional<std::string> size_problem(const fs::path& file, int64_t num_bytes) {
  const Storage::Status found = storage_of(file).status(file);
  if (found.kind != Storage::Kind::File) return file.string() + detail::not_a_file(file);
  if (found.num_bytes != num_bytes)
    return str(file.string(), " has ", found.num_bytes, " bytes; the manifest says ", num_bytes);
  return std::nullopt;
}

fs::path without_slash(const fs::path& folder) {
  return folder.has_filename() ? folder : folder.parent_path();
}

}  // namespace

std::optional<std::string> detail::step_name_problem(const fs::path& step_folder, const Manifest& manifest) {
  const auto step = step_of_name(without_slash(step_folder).filename().string());
  if (!step || *step == manifest.step) return std::nullopt;
  return str((step_folder / kManifestName).string(), " is of step ", manifest.step,
             ", but its folder is named for step ", *step);
}

fs::path step_path(const fs::path& folder, int64_t step) { return folder / str(kPrefix, step); }

fs::path pending_path(const fs::path& folder, int64_t step, const std::string& run_id) {
  return folder / str(".", kPrefix, step, ".", run_id, ".tmp");
}

std::vector<StepEntry> list_steps(const fs::path& folder) {
  std::vector<StepEntry> steps;
  for (const std::string& name : names_in(folder)) {
    const auto step = step_of_name(name);
    if (!step || detail::kind_of(folder / name) != Storage::Kind::Folder) continue;
    steps.push_back({*step, folder / name, detail::is_file(folder / name / kManifestName)});
  }
  std::sort(steps.begin(), steps.end(), [](const auto& a, const auto& b) { return a.step < b.step; });
  return steps;
}

std::vector<Leftover> list_leftovers(const fs::path& folder) {
  std::vector<Leftover> leftovers;
  for (const std::string& name : names_in(folder)) {
    auto leftover = leftover_of_name(name);
    if (!leftover) continue;
    leftover->path = folder / name;
    leftovers.push_back(*std::move(leftover));
  }
  std::sort(leftovers.begin(), leftovers.end(), [](const auto& a, const auto& b) { return a.path < b.path; });
  return leftovers;
}

bool lacks_successor(const Leftover& leftover, const fs::path& folder) {
  return leftover.kind == LeftoverKind::Replaced && !detail::is_there(step_path(folder, leftover.step));
}

std::vector<fs::path> list_put_aside(const fs::path& folder) {
  std::vector<fs::path> paths;
  for (const std::string& name : names_in(folder))
    if (is_put_aside(name)) paths.push_back(folder / name);
  std::sort(paths.begin(), paths.end());
  return paths;
}

Manifest read_manifest(const fs::path& folder) {
  const fs::path path = folder / kManifestName;
  return parse_manifest(detail::read_text(path, kMaxManifestBytes), path);
}

std::vector<std::string> quick_problems(const fs::path& step_folder, const Manifest& manifest) {
  std::vector<std::string> problems;
  if (auto problem = detail::step_name_problem(step_folder, manifest)) problems.push_back(*problem);
  for (size_t rank = 0; rank < manifest.files.size(); ++rank) {
    const fs::path file = step_folder / file_name(static_cast<int64_t>(rank));
    if (auto problem = size_problem(file, manifest.files[rank].num_bytes)) problems.push_back(*problem);
  }
  return problems;
}

std::vector<std::string> quick_problems(const fs::path& step_folder) {
  const fs::path manifest = step_folder / kManifestName;
  if (!detail::is_file(manifest)) return {manifest.string() + detail::not_a_file(manifest)};
  try {
    return quick_problems(step_folder, read_manifest(step_folder));
  } catch (const Error& error) {
    return {error.what()};
  }
}

std::optional<int64_t> newest_complete(const fs::path& folder, std::vector<std::string>& problems) {
  const std::vector<StepEntry> steps = list_steps(folder);
  for (auto entry = steps.rbegin(); entry != steps.rend(); ++entry) {
    const auto found = quick_problems(entry->path);
    if (found.empty()) return entry->step;
    problems.insert(problems.end(), found.begin(), found.end());
  }
  return std::nullopt;
}

}  // namespace titan::checkpoint
