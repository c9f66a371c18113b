#include "checkpoint/peer/peer_folder.h"

#include <sys/stat.h>
#include <unistd.h>
#include <cerrno>
#include <exception>

#include "checkpoint/peer/peer_folder_impl.h"
#include "checkpoint/save/shared_folder.h"
#include "core/durable.h"
#include "titan/core/error.h"
#include "titan/core/file.h"
#include "titan/core/log.h"

namespace titan::checkpoint {
namespace {

namespace fs = std::filesystem;
using titan::detail::errno_text;

constexpr dist::Label kFolderLabel{.phase = "checkpoint::peer_folder"};
constexpr const char* kPlaceName = ".place";
constexpr const char* kOwnerName = ".owner";

std::string short_digest(const std::string& text) { return digest_of(text).substr(0, 16); }

std::string name_prefix() { return titan::str("titan-peers-", ::geteuid(), "-"); }

// titan-peers-UID-JOB-RUN: a job's folders are found by the one, a run's by the other.
std::string folder_name(const PeerFolder::Options& options) {
  return titan::str(name_prefix(), short_digest(options.job), "-", short_digest(options.run));
}

// Others may write to the folder that it is in.
void make_private_folder(const fs::path& path) {
  if (::mkdir(path.c_str(), 0700) != 0 && errno != EEXIST)
    throw Error(titan::str("cannot make ", path.string(), ": ", errno_text(errno)));
  struct stat status = {};
  if (::lstat(path.c_str(), &status) != 0)
    throw Error(titan::str("cannot look at ", path.string(), ": ", errno_text(errno)));
  if (!S_ISDIR(status.st_mode) || status.st_uid != ::geteuid() || (status.st_mode & 077) != 0)
    throw Error(titan::str(path.string(), " isn't a folder of this user alone"));
}

std::vector<fs::path> peer_folders(const fs::path& parent) {
  std::vector<fs::path> folders;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(parent, ignored))
    if (entry.path().filename().string().starts_with(name_prefix()) &&
        titan::detail::is_own_folder(entry.path()))
      folders.push_back(entry.path());
  return folders;
}

bool is_of(const std::string& owner, const fs::path& folder) {
  std::error_code ignored;
  return !fs::exists(folder / kOwnerName, ignored) || read_file(folder / kOwnerName) == owner;
}

// Under its lock: who has that is at work there.
void remove_unless_used(const fs::path& folder) {
  const FolderLock lock(folder);
  titan::detail::remove_folder(folder);
  log::info(titan::str("removed ", folder.string(), ", which an earlier job of this run left"));
}

// Of a launcher that was killed: nobody else removes them. A run's mark may have come with a copy of its
// folder (train/checkpoints/peer_saves.h), so the mark alone doesn't tell.
void remove_earlier_jobs(const fs::path& own, const PeerFolder::Options& options) {
  for (const fs::path& folder : peer_folders(options.parent)) {
    if (folder == own || !folder.filename().string().ends_with("-" + short_digest(options.run))) continue;
    try {
      if (is_of(options.owner, folder))
        remove_unless_used(folder);
      else
        log::warning(titan::str(folder.string(), " has this run's mark, but is of a run that saves in ",
                                read_file(folder / kOwnerName), ": remove it if that one is over"));
    } catch (const Error& error) {
      log::warning(titan::str(folder.string(), " is left as it is: ", error.what()));
    }
  }
}

}  // namespace

PeerFolder::Impl::Impl(const dist::World& given, Options wanted)
    : world(given), options(std::move(wanted)), group(world.everyone()) {
  TITAN_CHECK(!options.job.empty() && !options.run.empty(), "peer checkpoints: the job has no name");
  path = options.parent / folder_name(options);
  hosts = group->all_gather_text(detail::own_host(), kFolderLabel);
  open();
}

std::vector<std::string> PeerFolder::Impl::problems_of_all(const std::function<void()>& own) const {
  std::string problem;
  try {
    own();
  } catch (const std::exception& error) {
    problem = error.what();
  }
  const auto all = group->all_gather_text(problem, kFolderLabel);
  std::vector<std::string> problems;
  for (size_t rank = 0; rank < all.size(); ++rank)
    if (!all[rank].empty())
      problems.push_back(titan::str("peer checkpoints: rank ", rank, " (", hosts[rank], "): ", all[rank]));
  return problems;
}

void PeerFolder::Impl::on_all(const std::function<void()>& own) const {
  std::string text;
  for (const std::string& problem : problems_of_all(own)) text += (text.empty() ? "" : "; ") + problem;
  if (!text.empty()) throw Error(text);
}

void PeerFolder::Impl::require_on_all(const std::function<void()>& own) const {
  auto problems = problems_of_all(own);
  if (!problems.empty()) throw ConfigError(std::move(problems));
}

std::vector<std::string> PeerFolder::Impl::gather(const std::string& own) const {
  const auto all = group->all_gather_text(is_leader() ? own : "", kFolderLabel);
  std::vector<std::string> texts;
  for (int place = 0; place < places.size(); ++place)
    texts.push_back(all[static_cast<size_t>(places.ranks_of(place).front())]);
  return texts;
}

// Two hosts that share a folder would be two places with the same files.
void PeerFolder::Impl::check_place(const std::string& identity) const {
  const std::string other = read_file(path / kPlaceName);
  if (other != identity)
    throw Error(titan::str(path.string(), " is shared with the host '", other.substr(0, other.find(' ')),
                           "': checkpoint.peer_folder has to be each host's own"));
}

void PeerFolder::Impl::open() {
  std::string identity;
  require_on_all([&] {
    make_private_folder(path);
    identity = detail::place_identity(path);
  });
  places = detail::PeerPlaces(group->all_gather_text(identity, kFolderLabel));
  require_on_all([&] {
    if (!is_leader()) return;
    write_file_atomic(path / kPlaceName, identity);
    if (!options.disk.empty())
      write_file_atomic(path / detail::kDiskName, fs::absolute(options.disk).string());
  });
  require_on_all([&] { check_place(identity); });
  require_on_all([&] {
    if (!is_leader()) return;
    lock.emplace(path);
    write_file_atomic(path / kOwnerName, options.owner);
    clean_leftovers(path, *lock);
    remove_earlier_jobs(path, options);
  });
  run_id = group->all_gather_text(detail::random_id(), kFolderLabel).front();
}

// Those that can't be removed are left to the next start.
void PeerFolder::Impl::remove_generations(std::optional<int64_t> but) const {
  if (!is_leader()) return;
  for (const StepEntry& entry : list_steps(path)) {
    if (entry.step == but) continue;
    try {
      remove_step(entry, run_id);
    } catch (const Error& error) {
      log::warning(error.what());
    }
  }
}

PeerFolder::PeerFolder(const dist::World& world, Options options)
    : impl_(std::make_unique<Impl>(world, std::move(options))) {}
PeerFolder::~PeerFolder() = default;

const fs::path& PeerFolder::path() const { return impl_->path; }
int PeerFolder::num_places() const { return impl_->places.size(); }
int PeerFolder::copy_target() const { return impl_->places.copy_target(impl_->world.rank()); }
std::vector<int> PeerFolder::copy_sources() const { return impl_->places.copy_sources(impl_->world.rank()); }
bool PeerFolder::is_leader() const { return impl_->is_leader(); }

void PeerFolder::forget() {
  impl_->chosen.reset();
  impl_->on_all([&] { impl_->remove_generations(std::nullopt); });
}

void PeerFolder::remove() {
  impl_->chosen.reset();
  impl_->on_all([&] {
    if (!impl_->is_leader()) return;
    impl_->lock.reset();
    titan::detail::remove_folder(impl_->path);
  });
}

std::vector<LeftState> end_peer_folders(const fs::path& parent, const std::string& job,
                                        const std::function<bool()>& gives_up) {
  const std::string prefix = titan::str(name_prefix(), short_digest(job), "-");
  std::vector<LeftState> states;
  for (const fs::path& folder : peer_folders(parent)) {
    if (!folder.filename().string().starts_with(prefix)) continue;
    try {
      const auto state = detail::save_newest_generation(folder, gives_up);
      if (state) states.push_back(*state);
      if (!state || state->problem.empty()) titan::detail::remove_folder(folder);
    } catch (const std::exception& error) {
      log::warning(error.what());
    }
  }
  return states;
}

}  // namespace titan::checkpoint
