#include "titan/checkpoint/step_folder.h"

#include <algorithm>
#include <charconv>
#include <iterator>
#include <utility>

#include "checkpoint/format/rank_file.h"
#include "titan/core/error.h"
#include "titan/core/log.h"

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

// Parses ".step-STEP.RUN" followed by one of the suffixes.
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

fs::path hidden_path(const fs::path& folder, int64_t step, const std::string& run_id, const char* suffix) {
  return folder / str(".", kPrefix, step, ".", run_id, suffix);
}

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

// [Note: what a kill leaves]
//
// A step gets its name by one rename. Where an older step has the name, the two names are exchanged
// atomically, and the older step, now under the pending name, is removed:
//
//   step-N old   .tmp new      before
//   step-N new   .tmp old      after the exchange; a kill leaves a leftover
//
// Where the storage can't exchange, or the older one is to be kept:
//
//   step-N old                       .tmp new   before
//                .replaced old       .tmp new   neither has the name: clean_leftovers restores .replaced
//   step-N new   .replaced old                  a leftover
//
// A folder to be removed is renamed to .old first, which nothing restores, since it may be half empty. So
// .replaced is always whole.

using detail::is_there;

fs::path removed_path(const fs::path& folder, int64_t step, const std::string& run_id) {
  return hidden_path(folder, step, run_id, ".old");
}

void rename_step(const fs::path& from, const fs::path& to) { storage_of(from).rename(from, to); }
void sync(const fs::path& folder) { storage_of(folder).sync(folder); }

// The folder has already lost its name, so a failure only wastes space.
void remove_or_warn(const fs::path& folder) {
  try {
    storage_of(folder).remove(folder);
  } catch (const Error& error) {
    log::warning(error.what());
  }
}

// A model's are found with its manifest, if it has one.
std::vector<std::string> problems_of_earlier(const fs::path& step) {
  if (detail::is_file(step / kManifestName)) return quick_problems(step);
  if (!detail::is_file(step / kModelManifestName)) return {};
  try {
    return quick_problems(step, read_model_manifest(step));
  } catch (const Error& error) {
    return {error.what()};
  }
}

// "; it was damaged: step-7/rank_00001.safetensors is missing"; "" for a sound step.
std::string damage_text(const fs::path& step) {
  const std::vector<std::string> problems = problems_of_earlier(step);
  if (problems.empty()) return "";
  return str("; it was damaged: ", problems.front(),
             problems.size() > 1 ? str(" (and ", problems.size() - 1, " more)") : "");
}

void remove_as_old(const fs::path& path, const fs::path& removed) {
  Storage& storage = storage_of(path);
  storage.remove(removed);
  storage.rename(path, removed);
  storage.sync(path.parent_path());
  storage.remove(removed);
}

enum class Contents { Nothing, State, Model };

Contents contents_of(const fs::path& step) {
  if (detail::is_file(step / kManifestName)) return Contents::State;
  try {
    return storage_of(step).list(step).empty() ? Contents::Nothing : Contents::Model;
  } catch (const Error&) {
    return Contents::Model;
  }
}

// A state doesn't make a model of the same step superfluous, nor the reverse.
bool has_to_be_kept(const fs::path& old, const fs::path& successor) {
  return contents_of(old) != Contents::Nothing && contents_of(old) != contents_of(successor);
}

void keep_aside(const fs::path& old, const fs::path& target) {
  const char* kind = contents_of(old) == Contents::State ? ".state" : ".model";
  fs::path name = target;
  name += kind;
  for (int number = 2; is_there(name); ++number) {
    name = target;
    name += str(kind, ".", number);
  }
  const bool is_state = contents_of(old) == Contents::State;
  const std::string damage = damage_text(old);
  rename_step(old, name);
  log::warning(str("the earlier ", target.string(), " is kept as ", name.string(), ": it has ",
                   is_state ? "a state, and a model takes its place"
                            : "no manifest.json (a model, or a damaged state), and a state takes its place",
                   damage));
}

// Called when the successor has the name.
void retire(const Leftover& replaced) {
  const fs::path folder = replaced.path.parent_path(), target = step_path(folder, replaced.step);
  try {
    has_to_be_kept(replaced.path, target)
        ? keep_aside(replaced.path, target)
        : remove_as_old(replaced.path, removed_path(folder, replaced.step, replaced.run_id));
  } catch (const Error& error) {
    log::warning(error.what());
  }
}

void replace_in_two_renames(const fs::path& pending, const fs::path& target, const fs::path& replaced) {
  rename_step(target, replaced);
  try {
    rename_step(pending, target);
  } catch (const Error&) {
    try {
      rename_step(replaced, target);
    } catch (const Error& error) {
      log::error(str(error.what(), "; the next run tries again"));
    }
    throw;
  }
}

bool exchange_and_sync(const fs::path& pending, const fs::path& target) {
  Storage& storage = storage_of(target);
  if (!storage.exchange(pending, target)) return false;
  try {
    storage.sync(target.parent_path());  // before the older one is removed
  } catch (const Error&) {
    // The exchange may not be durable. Undo it, so that the caller removes the new one as pending.
    storage.exchange(pending, target);
    throw;
  }
  return true;
}

void warn_of_leftovers(const fs::path& folder) {
  for (const Leftover& leftover : list_leftovers(folder))
    log::warning(str(leftover.path.string(), " belongs to a run that is working on it or was killed",
                     lacks_successor(leftover, folder)
                         ? str("; if it was killed, this is a whole step: rename it to ",
                               step_path(folder, leftover.step).string())
                         : ""));
}

bool is_good(const StepEntry& step) {
  if (!step.has_manifest) return false;
  try {
    const Manifest manifest = read_manifest(step.path);
    return manifest.finite && quick_problems(step.path, manifest).empty();
  } catch (const Error&) {
    return false;
  }
}

}  // namespace

std::optional<std::string> detail::step_name_problem(const fs::path& step_folder, const Manifest& manifest) {
  if (is_model_alone(manifest)) return std::nullopt;  // may have any name
  const auto step = step_of_name(without_slash(step_folder).filename().string());
  if (!step || *step == manifest.step) return std::nullopt;
  return str((step_folder / kManifestName).string(), " belongs to step ", manifest.step,
             ", but its folder is named for step ", *step);
}

fs::path step_path(const fs::path& folder, int64_t step) { return folder / str(kPrefix, step); }

fs::path pending_path(const fs::path& folder, int64_t step, const std::string& run_id) {
  return hidden_path(folder, step, run_id, ".tmp");
}

std::vector<StepEntry> list_steps(const fs::path& folder) {
  std::vector<StepEntry> steps;
  for (const std::string& name : storage_of(folder).list(folder)) {
    const auto step = step_of_name(name);
    if (!step || detail::kind_of(folder / name) != Storage::Kind::Folder) continue;
    steps.push_back({*step, folder / name, detail::is_file(folder / name / kManifestName)});
  }
  std::ranges::sort(steps, {}, &StepEntry::step);
  return steps;
}

std::vector<Leftover> list_leftovers(const fs::path& folder) {
  std::vector<Leftover> leftovers;
  for (const std::string& name : storage_of(folder).list(folder)) {
    auto leftover = leftover_of_name(name);
    if (!leftover) continue;
    leftover->path = folder / name;
    leftovers.push_back(*std::move(leftover));
  }
  std::ranges::sort(leftovers, {}, &Leftover::path);
  return leftovers;
}

bool lacks_successor(const Leftover& leftover, const fs::path& folder) {
  return leftover.kind == LeftoverKind::Replaced && !detail::is_there(step_path(folder, leftover.step));
}

std::vector<fs::path> list_put_aside(const fs::path& folder) {
  std::vector<fs::path> paths;
  for (const std::string& name : storage_of(folder).list(folder))
    if (is_put_aside(name)) paths.push_back(folder / name);
  std::sort(paths.begin(), paths.end());
  return paths;
}

Manifest read_manifest(const fs::path& folder) {
  const fs::path path = folder / kManifestName;
  return parse_manifest(detail::read_text(path, kMaxManifestBytes), path);
}

Manifest read_model_manifest(const fs::path& folder) {
  const fs::path path = folder / kModelManifestName;
  Manifest manifest = parse_manifest(detail::read_text(path, kMaxManifestBytes), path);
  TITAN_CHECK(detail::is_model_alone(manifest), path.string(), ": doesn't describe a model saved alone");
  return manifest;
}

bool holds_model_alone(const fs::path& folder) {
  const auto has = [&](const std::string& name) { return detail::is_there(folder / name); };
  return !has(kManifestName) && (has(kModelManifestName) || has(detail::model_file_name(0, 1)) ||
                                 has(detail::kModelIndex) || has("config.json"));
}

std::vector<std::string> quick_problems(const fs::path& step_folder, const Manifest& manifest) {
  std::vector<std::string> problems;
  if (auto problem = detail::step_name_problem(step_folder, manifest)) problems.push_back(*problem);
  for (size_t rank = 0; rank < manifest.files.size(); ++rank) {
    const fs::path file = detail::stored_file(step_folder, manifest, static_cast<int64_t>(rank));
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

// ---- writing and removing

FolderLock::FolderLock(const fs::path& folder) : lock_(storage_of(folder).lock(folder)) {}

void commit_step(const fs::path& folder, int64_t step, const std::string& run_id) {
  const fs::path pending = pending_path(folder, step, run_id), target = step_path(folder, step);
  sync(pending);
  if (!is_there(target)) {
    rename_step(pending, target);
    return sync(folder);
  }
  const bool is_kept = has_to_be_kept(target, pending);
  const std::string removal = str("removed the earlier ", target.string(), ", because the new step ", step,
                                  " takes its place", damage_text(target));
  // After an exchange, a kill leaves a folder that only needs removing.
  if (!is_kept && exchange_and_sync(pending, target)) {
    remove_or_warn(pending);
    return log::info(removal);
  }
  const Leftover replaced{.step = step,
                          .run_id = run_id,
                          .path = hidden_path(folder, step, run_id, ".replaced"),
                          .kind = LeftoverKind::Replaced};
  if (is_there(replaced.path)) remove_as_old(replaced.path, removed_path(folder, step, run_id));
  replace_in_two_renames(pending, target, replaced.path);
  sync(folder);
  retire(replaced);
  if (!is_kept) log::info(removal);
}

void clean_leftovers(const fs::path& folder, const FolderLock& lock) {
  if (!lock.held()) return warn_of_leftovers(folder);
  for (const Leftover& leftover : list_leftovers(folder)) {
    if (!lacks_successor(leftover, folder)) continue;
    rename_step(leftover.path, step_path(folder, leftover.step));
    log::info(str("restored ", step_path(folder, leftover.step).string(),
                  ", which a run was replacing when it was killed"));
  }
  const std::vector<Leftover> leftovers = list_leftovers(folder);
  if (leftovers.empty()) return;
  sync(folder);
  for (const Leftover& leftover : leftovers) {
    log::info(str("removing ", leftover.path.string(), ", which a killed run left"));
    leftover.kind == LeftoverKind::Replaced ? retire(leftover) : remove_or_warn(leftover.path);
  }
}

std::vector<StepEntry> steps_to_prune(const std::vector<StepEntry>& steps, int64_t keep) {
  if (keep <= 0) return {};
  std::vector<StepEntry> newest_first;
  std::ranges::copy_if(steps, std::back_inserter(newest_first), &StepEntry::has_manifest);
  std::ranges::sort(newest_first, std::greater(), &StepEntry::step);
  const auto good = std::ranges::find_if(newest_first, is_good);
  std::vector<StepEntry> pruned;
  for (auto step = newest_first.begin(); step != newest_first.end(); ++step)
    if (step - newest_first.begin() >= keep && step != good) pruned.push_back(*step);
  std::reverse(pruned.begin(), pruned.end());
  return pruned;
}

void remove_step(const StepEntry& step, const std::string& run_id) {
  remove_as_old(step.path, removed_path(step.path.parent_path(), step.step, run_id));
}

}  // namespace titan::checkpoint
