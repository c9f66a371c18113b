#include "checkpoint/peer/peer_folder.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <exception>

#include "checkpoint/format/rank_file.h"
#include "checkpoint/format/stored_files.h"
#include "checkpoint/save/rank_tree.h"
#include "checkpoint/save/shared_folder.h"
#include "core/durable.h"
#include "core/file.h"
#include "titan/core/error.h"
#include "titan/core/log.h"

namespace titan::checkpoint {
namespace {

namespace fs = std::filesystem;
using titan::detail::errno_text;

constexpr dist::Label kFolderLabel{.phase = "checkpoint::peer_folder"};
constexpr const char* kPlaceName = ".place";
constexpr const char* kOwnerName = ".owner";
constexpr const char* kDiskName = ".disk";  // holds the path of the folder where the run saves
constexpr int64_t kCopiedBytes = int64_t{4} << 20;

std::string short_digest(const std::string& text) { return digest_of(text).substr(0, 16); }

std::string name_prefix() { return titan::str("titan-peers-", ::geteuid(), "-"); }

// titan-peers-UID-JOB-RUN: a job's folders are found by the first, a run's by the second.
std::string folder_name(const PeerFolder::Options& options) {
  return titan::str(name_prefix(), short_digest(options.job), "-", short_digest(options.run));
}

// Other users may write to its parent.
void make_private_folder(const fs::path& path) {
  if (::mkdir(path.c_str(), 0700) != 0 && errno != EEXIST)
    throw Error(titan::str("cannot make ", path.string(), ": ", errno_text(errno)));
  struct stat status = {};
  if (::lstat(path.c_str(), &status) != 0)
    throw Error(titan::str("cannot look at ", path.string(), ": ", errno_text(errno)));
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

// Left by a job whose launcher was killed: nobody else removes them. A run's mark may have been copied with
// the run's folder (train/run_mark.h), so the mark alone isn't enough. The lock is held by whoever is using a
// folder.
void remove_earlier_jobs(const fs::path& own, const PeerFolder::Options& options) {
  for (const fs::path& folder : peer_folders(options.parent)) {
    if (folder == own || !folder.filename().string().ends_with("-" + short_digest(options.run))) continue;
    try {
      const bool has_owner = detail::is_there(folder / kOwnerName);
      if (has_owner && read_file(folder / kOwnerName) != options.owner) {
        log::warning(titan::str(folder.string(), " has this run's mark, but is of a run that saves in ",
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

// ---- a generation as a step on disk, when no rank is left to save it. It has the same files, so it is
// copied.

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

// A damaged generation doesn't become a step: the damage would only be found when a run loads it.
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
    throw Error(str(disk.string(), ", where the run saves, isn't there"));
  return disk;
}

// Copies the newest generation of which this place has all files to the run's disk, and compares every
// checksum. nullopt: there is no generation, or a complete step on disk is as new. Throws Error where
// `folder` can't be read; any other failure is the state's problem, and leaves the disk unchanged.
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
      if (gives_up && gives_up()) throw Error("told to end at once");
    });
  } catch (const std::exception& error) {
    state.problem = error.what();
  }
  return state;
}

}  // namespace

PeerFolder::PeerFolder(const dist::World& world, Options options)
    : world_(world),
      options_(std::move(options)),
      group_(world_.everyone()),
      path_(options_.parent / folder_name(options_)) {
  TITAN_CHECK(!options_.job.empty() && !options_.run.empty(), "peer checkpoints: the job has no name");
  require_local(path_, "the folder of peer checkpoints");
  hosts_ = group_->all_gather_text(detail::own_host(), kFolderLabel);
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
  std::string text;
  for (const std::string& problem : problems_of_all(own)) text += (text.empty() ? "" : "; ") + problem;
  if (!text.empty()) throw Error(text);
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
    throw Error(titan::str(path_.string(), " is shared with the host '", other.substr(0, other.find(' ')),
                           "': checkpoint.peer_folder has to be each host's own"));
}

// The next start removes what can't be removed now.
void PeerFolder::remove_generations(std::optional<int64_t> except) const {
  if (!is_leader()) return;
  for (const StepEntry& entry : list_steps(path_)) {
    if (entry.step == except) continue;
    try {
      remove_step(entry, run_id_);
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
      if (!state || state->problem.empty()) titan::detail::remove_folder(folder);
    } catch (const std::exception& error) {
      log::warning(error.what());
    }
  }
  return states;
}

}  // namespace titan::checkpoint
