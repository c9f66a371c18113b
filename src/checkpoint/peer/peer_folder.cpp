#include "checkpoint/peer/peer_folder.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <exception>
#include <utility>

#include <c10/util/StringUtil.h>

#include "checkpoint/format/rank_file.h"
#include "checkpoint/format/stored_files.h"
#include "checkpoint/peer/peer_writer.h"
#include "checkpoint/save/rank_tree.h"
#include "core/durable.h"
#include "core/file.h"
#include "core/process.h"
#include "titan/core/error.h"
#include "titan/core/log.h"

namespace titan::checkpoint::detail {
namespace {

namespace fs = std::filesystem;

// The files of a generation that are at this place; most are at other places.
std::vector<int64_t> files_in(const fs::path& folder, const Manifest& manifest,
                              std::vector<std::string>& problems) {
  std::vector<int64_t> ranks;
  for (size_t rank = 0; rank < manifest.files.size(); ++rank) {
    const fs::path file = folder / file_name(static_cast<int64_t>(rank));
    const Storage::Status found = storage_of(file).status(file);
    if (found.kind != Storage::Kind::File) continue;
    if (found.num_bytes == manifest.files[rank].num_bytes)
      ranks.push_back(static_cast<int64_t>(rank));
    else
      problems.push_back(titan::str(file.string(), " has ", found.num_bytes, " bytes instead of ",
                                    manifest.files[rank].num_bytes));
  }
  return ranks;
}

// Lets the holders take turns, without counting how much each of them sends.
int sender_of(int64_t file, int to_place, const std::vector<int>& holders, const PeerPlaces& places) {
  const auto turn = static_cast<size_t>(file + to_place);
  const std::vector<int>& ranks = places.ranks_of(holders[turn % holders.size()]);
  return ranks[static_cast<size_t>(file) % ranks.size()];
}

}  // namespace

PeerPlaces::PeerPlaces(const std::vector<std::string>& identities) {
  std::map<std::string, int> known;
  for (size_t rank = 0; rank < identities.size(); ++rank) {
    const auto [entry, is_new] = known.emplace(identities[rank], size());
    if (is_new) ranks_of_.emplace_back();
    place_of_.push_back(entry->second);
    ranks_of_[static_cast<size_t>(entry->second)].push_back(static_cast<int>(rank));
  }
}

int PeerPlaces::copy_target(int rank) const {
  if (size() < 2) return -1;
  const int place = place_of(rank);
  const std::vector<int>& own = ranks_of(place);
  const std::vector<int>& next = ranks_of((place + 1) % size());
  const auto position = static_cast<size_t>(std::find(own.begin(), own.end(), rank) - own.begin());
  return next[position % next.size()];
}

std::vector<int> PeerPlaces::copy_sources(int rank) const {
  std::vector<int> sources;
  if (size() < 2) return sources;
  for (const int source : ranks_of((place_of(rank) + size() - 1) % size()))
    if (copy_target(source) == rank) sources.push_back(source);
  return sources;
}

// Inodes alone may be equal on hosts that boot alike, and hosts may share a name.
std::string place_identity(const fs::path& folder) {
  struct stat status = {};
  if (::stat(folder.c_str(), &status) != 0)
    throw Error(titan::str("cannot stat ", folder.string(), ": ", errno_text(errno)));
  return titan::str(host_identity(), " ", status.st_dev, " ", status.st_ino);
}

std::vector<HeldGeneration> held_generations(const fs::path& folder, std::vector<std::string>& problems) {
  std::vector<HeldGeneration> held;
  for (const StepEntry& entry : list_steps(folder)) {
    try {
      const Manifest manifest = read_manifest(entry.path);
      TITAN_CHECK(manifest.step == entry.step, entry.path.string(), " belongs to step ", manifest.step);
      held.push_back({entry.step, digest_of(to_text(manifest)), static_cast<int64_t>(manifest.files.size()),
                      files_in(entry.path, manifest, problems)});
    } catch (const Error& error) {
      problems.push_back(error.what());
    }
  }
  return held;
}

bool ChosenGeneration::is_whole() const {
  return std::none_of(holders.begin(), holders.end(), [](const auto& places) { return places.empty(); });
}

std::optional<ChosenGeneration> newest_generation(const std::vector<std::vector<HeldGeneration>>& held) {
  std::map<std::pair<int64_t, std::string>, ChosenGeneration> found;
  for (size_t place = 0; place < held.size(); ++place) {
    for (const HeldGeneration& part : held[place]) {
      ChosenGeneration& whole = found[{part.step, part.digest}];
      whole.step = part.step;
      whole.digest = part.digest;
      whole.holders.resize(static_cast<size_t>(part.num_files));
      whole.has_manifest.resize(held.size());
      whole.has_manifest[place] = true;
      for (const int64_t rank : part.ranks)
        whole.holders.at(static_cast<size_t>(rank)).push_back(static_cast<int>(place));
    }
  }
  const auto newest =
      std::find_if(found.rbegin(), found.rend(), [](const auto& entry) { return entry.second.is_whole(); });
  return newest == found.rend() ? std::nullopt : std::optional(newest->second);
}

std::vector<FileMove> moves_for(const std::vector<std::set<int64_t>>& wanted,
                                const std::vector<std::vector<int>>& holders, const PeerPlaces& places) {
  std::vector<FileMove> moves;
  for (int place = 0; place < places.size(); ++place) {
    std::set<int64_t> coming;
    for (const int rank : places.ranks_of(place)) {
      for (const int64_t file : wanted[static_cast<size_t>(rank)]) {
        const std::vector<int>& at = holders.at(static_cast<size_t>(file));
        if (std::find(at.begin(), at.end(), place) != at.end() || !coming.insert(file).second) continue;
        moves.push_back({file, sender_of(file, place, at, places), rank});
      }
    }
  }
  return moves;
}

}  // namespace titan::checkpoint::detail

namespace titan::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr dist::Label kFolderLabel{.phase = "checkpoint::peer_folder"};
constexpr const char* kPlaceName = ".place";
constexpr const char* kOwnerName = ".owner";
constexpr const char* kDiskName = ".disk";  // holds the path of the folder where the run saves
constexpr int64_t kCopiedBytes = int64_t{4} << 20;

std::string short_digest(const std::string& text) { return digest_of(text).substr(0, 16); }

std::string name_prefix() { return titan::str("titan-peers-", ::geteuid(), "-"); }

// titan-peers-UID-JOB-RUN: JOB identifies a job's folders, RUN a run's.
std::string folder_name(const PeerFolder::Options& options) {
  return titan::str(name_prefix(), short_digest(options.job), "-", short_digest(options.run));
}

// Checks owner and mode, because other users may write to the parent.
void make_private_folder(const fs::path& path) {
  if (::mkdir(path.c_str(), 0700) != 0 && errno != EEXIST)
    throw Error(titan::str("cannot make ", path.string(), ": ", errno_text(errno)));
  struct stat status = {};
  if (::lstat(path.c_str(), &status) != 0)
    throw Error(titan::str("cannot stat ", path.string(), ": ", errno_text(errno)));
  if (!S_ISDIR(status.st_mode) || status.st_uid != ::geteuid() || (status.st_mode & 077) != 0)
    throw Error(titan::str(path.string(), " isn't a folder that only this user can access"));
}

std::vector<fs::path> peer_folders(const fs::path& parent) {
  std::vector<fs::path> folders;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(parent, ignored))
    if (entry.path().filename().string().starts_with(name_prefix()) &&
        detail::kind_of(entry.path()) == Storage::Kind::Folder)
      folders.push_back(entry.path());
  return folders;
}

// Removes folders of jobs whose launcher was killed: nothing else removes them. A run's mark may have been
// copied with the run's folder (train/checkpoints/peer_saves.h), so the mark alone isn't enough. A folder in
// use is locked.
void remove_earlier_jobs(const fs::path& own, const PeerFolder::Options& options) {
  for (const fs::path& folder : peer_folders(options.parent)) {
    if (folder == own || !folder.filename().string().ends_with("-" + short_digest(options.run))) continue;
    try {
      const bool has_owner = detail::is_there(folder / kOwnerName);
      if (has_owner && read_file(folder / kOwnerName) != options.owner) {
        log::warning(titan::str(folder.string(),
                                " carries this run's mark but belongs to a run that saves in ",
                                read_file(folder / kOwnerName), ": remove it if that run is over"));
        continue;
      }
      const FolderLock lock(folder);
      titan::detail::remove_folder(folder);
      log::info(titan::str("removed ", folder.string(), ", which an earlier job of this run left"));
    } catch (const Error& error) {
      log::warning(titan::str(folder.string(), " is left as it is: ", error.what()));
    }
  }
}

// ---- copying a generation to disk when no rank is left to save it: a step there has the same files

// Throws to stop copying.
using Poll = std::function<void()>;

void copy_file(const fs::path& from, const fs::path& to, const FileRecord& record, const Poll& poll) {
  const detail::InputFile input(from);
  if (input.num_bytes() != record.num_bytes)
    throw Error(str(from.string(), " has ", input.num_bytes(), " bytes instead of ", record.num_bytes));
  const auto output = storage_of(to).create(to, record.num_bytes);
  std::vector<std::byte> piece(static_cast<size_t>(std::min(kCopiedBytes, record.num_bytes)));
  for (int64_t offset = 0; offset < record.num_bytes; offset += kCopiedBytes) {
    poll();
    const std::span<std::byte> part(piece.data(),
                                    static_cast<size_t>(std::min(kCopiedBytes, record.num_bytes - offset)));
    input.read(part, offset);
    const std::span<const std::byte> bytes = part;
    output->write({&bytes, 1}, offset);
  }
  output->finish();
}

// Verifies each copy: damage in a step would otherwise be found only when a run loads it.
void copy_files(const fs::path& from, const fs::path& to, const Poll& poll) {
  const Manifest manifest = read_manifest(from);
  const auto num_files = static_cast<int64_t>(manifest.files.size());
  for (int64_t rank = 0; rank < num_files; ++rank) {
    const FileRecord& record = manifest.files[static_cast<size_t>(rank)];
    copy_file(from / file_name(rank), to / file_name(rank), record, poll);
    RankFile(to / file_name(rank), {manifest.run_id, manifest.step, rank, num_files}, record)
        .verify([&](int64_t /*bytes*/) { poll(); });
  }
  detail::write_text(to / kManifestName, detail::read_text(from / kManifestName));
}

void copy_step(const fs::path& from, int64_t step, const fs::path& disk, const Poll& poll) {
  const FolderLock lock(disk);
  const std::string id = detail::random_id();
  const fs::path pending = pending_path(disk, step, id);
  try {
    storage_of(pending).make_folder(pending);
    copy_files(from, pending, poll);
    commit_step(disk, step, id);
  } catch (const std::exception&) {
    detail::remove_quietly(pending);
    throw;
  }
}

// If the folder doesn't exist, its storage may not be mounted.
fs::path disk_of(const fs::path& folder) {
  const fs::path disk = read_file(folder / kDiskName);
  if (is_local(disk) && !fs::is_directory(disk))
    throw Error(str(disk.string(), ", where the run saves, doesn't exist"));
  return disk;
}

// Copies the newest generation of which this place has all files to the run's disk, and compares every
// checksum. Returns nothing if there is no such generation, or if a complete step on disk is as new. Throws
// Error if `folder` can't be read; any other failure is recorded in the state, and leaves the disk unchanged.
std::optional<LeftState> save_newest_generation(const fs::path& folder,
                                                const std::function<bool()>& gives_up) {
  std::vector<std::string> ignored;
  const auto newest = detail::newest_generation({detail::held_generations(folder, ignored)});
  if (!newest) return std::nullopt;
  LeftState state{.step = newest->step, .memory = step_path(folder, newest->step)};
  try {
    const fs::path disk = disk_of(folder);
    state.disk = step_path(disk, newest->step);
    if (newest_complete(disk, ignored).value_or(-1) >= newest->step) return std::nullopt;
    copy_step(state.memory, newest->step, disk, [&] {
      if (gives_up && gives_up()) throw Error("the copy was stopped before it was complete");
    });
  } catch (const std::exception& error) {
    state.problem = error.what();
  }
  return state;
}

// ---- choosing the generation to load, and sending its files to the places that read them

constexpr dist::Label kPeerLoadLabel{.phase = "checkpoint::peer_load"};

// Describes a file's damage; empty: it has none. Removes a damaged file, so that a later start doesn't rely
// on it either. Throws Error if the file exists but can't be opened, which says nothing about its contents.
std::string remove_if_damaged(const fs::path& folder, const Manifest& manifest, int64_t file) {
  const fs::path path = folder / file_name(file);
  if (fs::exists(path)) const detail::InputFile opened(path);
  try {
    detail::open_rank_file(folder, manifest, file).verify();
    return "";
  } catch (const Error& error) {
    detail::remove_quietly(path);
    return error.what();
  }
}

bool is_at(const std::vector<int>& places, int place) {
  return std::find(places.begin(), places.end(), place) != places.end();
}

}  // namespace

PeerFolder::PeerFolder(const dist::World& world, Options options)
    : world_(world),
      options_(std::move(options)),
      group_(world_.everyone()),
      path_(options_.parent / folder_name(options_)) {
  TITAN_CHECK(!options_.job.empty() && !options_.run.empty(), "peer checkpoints: the job has no name");
  require_local(path_, "the folder of peer checkpoints");
  hosts_ = group_->all_gather_text(host_name(), kFolderLabel);
  std::string identity;
  require_on_all([&] {
    make_private_folder(path_);
    identity = detail::place_identity(path_);
  });
  places_ = detail::PeerPlaces(group_->all_gather_text(identity, kFolderLabel));
  require_on_all([&] {
    if (!is_leader()) return;
    write_file_atomic(path_ / kPlaceName, identity);
    if (!options_.disk.empty()) write_file_atomic(path_ / kDiskName, normalized(options_.disk).string());
  });
  require_on_all([&] { check_place(identity); });
  require_on_all([&] {
    if (!is_leader()) return;
    lock_.emplace(path_);
    write_file_atomic(path_ / kOwnerName, options_.owner);
    clean_leftovers(path_, *lock_);
    remove_earlier_jobs(path_, options_);
  });
  run_id_ = group_->all_gather_text(detail::random_id(), kFolderLabel).front();
}

std::vector<std::string> PeerFolder::problems_of_all(const std::function<void()>& own) const {
  const auto all = group_->all_gather_text(detail::problem_of(own), kFolderLabel);
  std::vector<std::string> problems;
  for (size_t rank = 0; rank < all.size(); ++rank)
    if (!all[rank].empty())
      problems.push_back(
          titan::str("peer checkpoints: ", detail::rank_on(rank, hosts_[rank]), ": ", all[rank]));
  return problems;
}

void PeerFolder::on_all(const std::function<void()>& own) const {
  const auto problems = problems_of_all(own);
  if (!problems.empty()) throw Error(c10::Join("; ", problems));
}

void PeerFolder::require_on_all(const std::function<void()>& own) const {
  auto problems = problems_of_all(own);
  if (!problems.empty()) throw ConfigError(std::move(problems));
}

std::vector<std::string> PeerFolder::gather(const std::string& own) const {
  const auto all = group_->all_gather_text(is_leader() ? own : "", kFolderLabel);
  std::vector<std::string> texts;
  for (int place = 0; place < places_.size(); ++place)
    texts.push_back(all[static_cast<size_t>(places_.ranks_of(place).front())]);
  return texts;
}

// Two hosts that share a folder would be two places with the same files.
void PeerFolder::check_place(const std::string& identity) const {
  const std::string other = read_file(path_ / kPlaceName);
  if (other != identity)
    throw Error(titan::str(path_.string(), " is shared with the host '",
                           other.substr(0, other.find_first_of("/ ")),
                           "': each host needs its own checkpoint.peer_folder"));
}

// The next start removes what can't be removed now.
void PeerFolder::remove_generations(std::optional<int64_t> except) const {
  if (!is_leader()) return;
  for (const StepEntry& entry : list_steps(path_)) {
    if (entry.step == except) continue;
    try {
      remove_step(entry, run_id_);
      log::info(
          titan::str("peer checkpoints: removed ", entry.path.string(), ": the run doesn't resume from it"));
    } catch (const Error& error) {
      log::warning(error.what());
    }
  }
}

void PeerFolder::forget() {
  chosen_.reset();
  on_all([&] { remove_generations(std::nullopt); });
}

void PeerFolder::remove() {
  chosen_.reset();
  on_all([&] {
    if (!is_leader()) return;
    lock_.reset();
    titan::detail::remove_folder(path_);
    log::info(titan::str("peer checkpoints: removed ", path_.string(), ": the run has ended"));
  });
}

std::vector<LeftState> end_peer_folders(const fs::path& parent, const std::string& job,
                                        const std::function<bool()>& gives_up) {
  const std::string prefix = titan::str(name_prefix(), short_digest(job), "-");
  std::vector<LeftState> states;
  for (const fs::path& folder : peer_folders(parent)) {
    if (!folder.filename().string().starts_with(prefix)) continue;
    try {
      const auto state = save_newest_generation(folder, gives_up);
      if (state) states.push_back(*state);
      if (state && !state->problem.empty()) continue;
      titan::detail::remove_folder(folder);
      log::info(titan::str("peer checkpoints: removed ", folder.string(),
                           ": nothing in it is newer than the steps on disk"));
    } catch (const std::exception& error) {
      log::warning(error.what());
    }
  }
  return states;
}

std::optional<int64_t> PeerFolder::choose_newest() {
  std::vector<std::string> problems;
  std::string own;
  on_all([&] {
    if (is_leader()) own = detail::to_wire(detail::held_generations(path_, problems));
  });
  for (const std::string& problem : problems) log::warning("peer checkpoints: skipped: " + problem);
  std::vector<std::vector<detail::HeldGeneration>> held;
  for (const std::string& text : gather(own))
    held.push_back(detail::from_wire<std::vector<detail::HeldGeneration>>(text));
  chosen_ = detail::newest_generation(held);
  const auto place = static_cast<size_t>(places_.place_of(world_.rank()));
  // A host that was away may have another generation of the same step.
  const bool has_it = chosen_ && chosen_->has_manifest[place];
  on_all([&] { remove_generations(has_it ? std::optional(chosen_->step) : std::nullopt); });
  if (!chosen_) return std::nullopt;
  take_manifest();
  return chosen_->step;
}

// Sends the manifest to places without it, from the first one that has it.
void PeerFolder::take_manifest() {
  const std::vector<bool>& has = chosen_->has_manifest;
  const auto first = static_cast<int>(std::find(has.begin(), has.end(), true) - has.begin());
  if (std::find(has.begin(), has.end(), false) == has.end()) return;
  const fs::path folder = step_path(path_, chosen_->step);
  const int place = places_.place_of(world_.rank());
  std::string text;
  on_all([&] {
    if (is_leader() && place == first) text = read_file(folder / kManifestName);
  });
  text = gather(text)[static_cast<size_t>(first)];
  on_all([&] {
    if (!is_leader() || has[static_cast<size_t>(place)]) return;
    make_folder(folder);
    write_file_atomic(folder / kManifestName, text);
  });
}

void PeerFolder::bring_files(const Manifest& manifest, const std::set<int64_t>& ranks) {
  TITAN_CHECK(chosen_ && chosen_->step == manifest.step, "peer checkpoints: files of step ", manifest.step,
              " are requested, but that generation wasn't chosen");
  const int place = places_.place_of(world_.rank());
  std::set<int64_t> missing = ranks;
  std::erase_if(missing,
                [&](int64_t file) { return is_at(chosen_->holders.at(static_cast<size_t>(file)), place); });
  std::vector<std::set<int64_t>> wanted;
  for (const std::string& text : group_->all_gather_text(detail::to_wire(missing), kPeerLoadLabel))
    wanted.push_back(detail::from_wire<std::set<int64_t>>(text));
  const auto moves = detail::moves_for(wanted, chosen_->holders, places_);
  const fs::path folder = step_path(path_, manifest.step);
  int64_t num_bytes = 0;
  on_all([&] {
    std::string problem;
    // All ranks make the moves in the same order, so that no two wait for each other. Moves between other
    // pairs run at the same time.
    for (const detail::FileMove& move : moves) {
      const int64_t file_bytes = manifest.files.at(static_cast<size_t>(move.file)).num_bytes;
      num_bytes += file_bytes;
      const bool sends = move.from == world_.rank();
      if (!sends && move.to != world_.rank()) continue;
      const auto text = detail::transfer_files(*group_, {{.path = folder / file_name(move.file),
                                                          .num_bytes = file_bytes,
                                                          .peer = sends ? move.to : move.from,
                                                          .sends = sends}});
      if (problem.empty()) problem = text;
    }
    TITAN_CHECK(problem.empty(), problem);
  });
  for (const detail::FileMove& move : moves)
    chosen_->holders[static_cast<size_t>(move.file)].push_back(places_.place_of(move.to));
  if (!moves.empty())
    log::info_rank0(titan::str("peer checkpoints: ", moves.size(), " file(s) of step ", manifest.step, ", ",
                               static_cast<double>(num_bytes) * 1e-9, " GB, came from other hosts' memory"));
}

// The ranks of a place share the work on its files.
std::map<int64_t, std::string> PeerFolder::remove_own_damaged() const {
  const fs::path folder = step_path(path_, chosen_->step);
  const Manifest manifest = read_manifest(folder);
  const int place = places_.place_of(world_.rank());
  const std::vector<int>& ranks = places_.ranks_of(place);
  std::map<int64_t, std::string> damage;
  size_t turn = 0;
  for (size_t file = 0; file < chosen_->holders.size(); ++file) {
    if (!is_at(chosen_->holders[file], place) || ranks[turn++ % ranks.size()] != world_.rank()) continue;
    const auto number = static_cast<int64_t>(file);
    const std::string what = remove_if_damaged(folder, manifest, number);
    if (!what.empty()) damage[number] = what;
  }
  return damage;
}

PeerFolder::Damage PeerFolder::remove_damaged() {
  TITAN_CHECK(chosen_, "peer checkpoints: no generation was chosen whose files could be checked");
  std::map<int64_t, std::string> own;
  on_all([&] { own = remove_own_damaged(); });
  const auto all = group_->all_gather_text(detail::to_wire(own), kPeerLoadLabel);
  Damage damage;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    for (const auto& [file, what] : detail::from_wire<decltype(own)>(all[rank])) {
      std::erase(chosen_->holders.at(static_cast<size_t>(file)), places_.place_of(static_cast<int>(rank)));
      damage.found.push_back(titan::str(detail::rank_on(rank, hosts_[rank]), ": ", what));
    }
  }
  damage.is_whole = chosen_->is_whole();
  return damage;
}

}  // namespace titan::checkpoint
