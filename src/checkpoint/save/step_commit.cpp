// FolderLock: flock, which the kernel gives back with the process that had it, however it ended.

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>
#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>

#include "core/durable.h"
#include "titan/checkpoint/step_folder.h"
#include "titan/core/error.h"
#include "titan/core/file.h"
#include "titan/core/log.h"

namespace titan::checkpoint {
namespace {

namespace fs = std::filesystem;
using titan::detail::errno_text;

class LockFile {
 public:
  explicit LockFile(const fs::path& path)
      : descriptor_(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666)) {
    if (descriptor_ < 0)
      throw Error(str("cannot lock: cannot open ", path.string(), ": ", errno_text(errno)));
  }
  ~LockFile() { ::close(descriptor_); }
  LockFile(const LockFile&) = delete;
  LockFile& operator=(const LockFile&) = delete;
  int get() const { return descriptor_; }

 private:
  int descriptor_;
};

std::string own_identity() {
  std::array<char, 256> host{};
  if (::gethostname(host.data(), host.size() - 1) != 0) host[0] = '?';
  return str("process ", ::getpid(), " on ", host.data());
}

// What its holder wrote there: shown, and not relied on.
std::string holder_of(const LockFile& file) {
  std::array<char, 320> text{};
  const ssize_t length = std::max<ssize_t>(0, ::pread(file.get(), text.data(), text.size(), 0));
  std::string holder(text.data(), static_cast<size_t>(length));
  holder = holder.substr(0, holder.find('\n'));
  const bool readable =
      std::all_of(holder.begin(), holder.end(), [](unsigned char c) { return std::isprint(c) != 0; });
  return readable && !holder.empty() ? holder : "another process";
}

// For people: that it can't be written doesn't matter.
void write_holder(const LockFile& file) {
  const std::string text = own_identity() + "\n";
  if (::ftruncate(file.get(), 0) != 0 || ::pwrite(file.get(), text.data(), text.size(), 0) < 0)
    log::debug("the lock file couldn't be written");
}

bool means_no_locks(int error) {
  return error == ENOLCK || error == EOPNOTSUPP || error == ENOSYS || error == EINVAL;
}

// Its own name has to last as long as the steps in it, and its run's folder may be as new.
void sync_folders_above(const fs::path& folder) {
  fs::path above = fs::absolute(folder).lexically_normal();
  if (!above.has_filename()) above = above.parent_path();
  for (int level = 0; level < 2 && above.has_relative_path(); ++level) {
    above = above.parent_path();
    try {
      titan::detail::sync_folder(above);
    } catch (const Error& error) {
      log::debug(error.what());  // one that may not be read was there before
    }
  }
}

int try_lock(const LockFile& file) {
  int result = 0;
  do result = ::flock(file.get(), LOCK_EX | LOCK_NB);
  while (result != 0 && errno == EINTR);
  return result == 0 ? 0 : errno;
}

}  // namespace

FolderLock::FolderLock(const fs::path& folder) {
  make_folder(folder);
  sync_folders_above(folder);
  auto file = std::make_shared<LockFile>(folder / ".lock");
  const int error = try_lock(*file);
  if (error == EWOULDBLOCK)
    throw Error(str(folder.string(), " is being written to by ", holder_of(*file),
                    "; a folder of checkpoints has one writer at a time"));
  if (means_no_locks(error)) {
    log::warning(str("the file system of ", folder.string(), " has no locks (", errno_text(error),
                     "): see to it that one run at a time writes there; leftovers of killed runs stay"));
    return;
  }
  if (error != 0) throw Error(str("cannot lock ", folder.string(), ": ", errno_text(error)));
  write_holder(*file);
  lock_ = std::move(file);
}

bool FolderLock::held() const { return lock_ != nullptr; }

// [Note: what a kill leaves]
//
// A step gets its name by one rename. Where an older step has the name, the two names are exchanged at one
// instant, and the older one, now under the pending name, is removed:
//
//   step-N old   .tmp new      before
//   step-N new   .tmp old      behind the exchange; a kill leaves a leftover
//
// Where the file system can't exchange, or what has the name is to be kept:
//
//   step-N old                       .tmp new   before
//                .replaced old       .tmp new   here neither has the name: clean_leftovers brings .replaced
//                back
//   step-N new   .replaced old                  a leftover
//
// What is removed gets the name .old first, which nothing brings back: it may be half empty. So .replaced is
// always whole.

namespace {

namespace fs = std::filesystem;
using titan::detail::is_there;
using titan::detail::remove_folder;
using titan::detail::rename_folder;
using titan::detail::sync_folder;

fs::path removed_path(const fs::path& folder, int64_t step, const std::string& run_id) {
  return folder / str(".step-", step, ".", run_id, ".old");
}

fs::path replaced_path(const fs::path& folder, int64_t step, const std::string& run_id) {
  return folder / str(".step-", step, ".", run_id, ".replaced");
}

// For what has lost its name already: it is in nobody's way but the disk's.
void remove_or_warn(const fs::path& folder) {
  try {
    remove_folder(folder);
  } catch (const Error& error) {
    log::warning(error.what());
  }
}

// Its name goes before its files do.
void remove_as_old(const fs::path& path, const fs::path& removed) {
  remove_folder(removed);
  rename_folder(path, removed);
  sync_folder(path.parent_path());
  remove_folder(removed);
}

enum class Kind { Nothing, State, Model };

Kind kind_of(const fs::path& step) {
  if (titan::detail::is_own_file(step / kManifestName)) return Kind::State;
  std::error_code unreadable;
  return fs::is_empty(step, unreadable) && !unreadable ? Kind::Nothing : Kind::Model;
}

// Somebody may miss the one who finds the other.
bool has_to_be_kept(const fs::path& old, const fs::path& successor) {
  return kind_of(old) != Kind::Nothing && kind_of(old) != kind_of(successor);
}

void keep_aside(const fs::path& old, const fs::path& target) {
  const char* kind = kind_of(old) == Kind::State ? ".state" : ".model";
  fs::path name = target;
  name += kind;
  for (int number = 2; is_there(name); ++number) {
    name = target;
    name += str(kind, ".", number);
  }
  rename_folder(old, name);
  log::warning(str(target.string(), " has made way for another: it is ", name.string(), " now"));
}

// For what step-N is there in place of.
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
  rename_folder(target, replaced);
  try {
    rename_folder(pending, target);
  } catch (const Error&) {
    try {
      rename_folder(replaced, target);
    } catch (const Error& error) {
      log::error(str(error.what(), "; the next run does it"));
    }
    throw;
  }
}

bool exchange_and_sync(const fs::path& pending, const fs::path& target) {
  if (!titan::detail::exchange_folders(pending, target)) return false;
  try {
    sync_folder(target.parent_path());  // before the older one goes
  } catch (const Error&) {
    // The exchange may not last: what the caller removes as pending has to be the new one.
    titan::detail::exchange_folders(pending, target);
    throw;
  }
  return true;
}

// Whose they are nobody knows.
void tell_of_leftovers(const fs::path& folder) {
  for (const Leftover& leftover : list_leftovers(folder))
    log::warning(str(leftover.path.string(), " is a run's that is at work, or was killed",
                     lacks_successor(leftover, folder)
                         ? str("; in the latter case it is a whole step: rename it to ",
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

void commit_step(const fs::path& folder, int64_t step, const std::string& run_id) {
  const fs::path pending = pending_path(folder, step, run_id), target = step_path(folder, step);
  sync_folder(pending);
  if (!is_there(target)) {
    rename_folder(pending, target);
    return sync_folder(folder);
  }
  // What a kill leaves behind an exchange is removed.
  if (!has_to_be_kept(target, pending) && exchange_and_sync(pending, target)) return remove_or_warn(pending);
  const Leftover replaced{.step = step,
                          .run_id = run_id,
                          .path = replaced_path(folder, step, run_id),
                          .kind = LeftoverKind::Replaced};
  if (is_there(replaced.path)) remove_as_old(replaced.path, removed_path(folder, step, run_id));
  replace_in_two_renames(pending, target, replaced.path);
  sync_folder(folder);
  retire(replaced);
}

bool lacks_successor(const Leftover& leftover, const fs::path& folder) {
  return leftover.kind == LeftoverKind::Replaced && !is_there(step_path(folder, leftover.step));
}

void clean_leftovers(const fs::path& folder, const FolderLock& lock) {
  if (!lock.held()) return tell_of_leftovers(folder);
  for (const Leftover& leftover : list_leftovers(folder)) {
    if (!lacks_successor(leftover, folder)) continue;
    rename_folder(leftover.path, step_path(folder, leftover.step));
    log::info(str("brought back ", step_path(folder, leftover.step).string(),
                  ", which a killed run was replacing"));
  }
  const std::vector<Leftover> leftovers = list_leftovers(folder);
  if (leftovers.empty()) return;
  sync_folder(folder);
  for (const Leftover& leftover : leftovers) {
    log::info(str("removing ", leftover.path.string(), ", which a killed run left"));
    leftover.kind == LeftoverKind::Replaced ? retire(leftover) : remove_or_warn(leftover.path);
  }
}

std::vector<StepEntry> steps_to_prune(const std::vector<StepEntry>& steps, int64_t keep) {
  if (keep <= 0) return {};
  std::vector<StepEntry> newest_first;
  for (const StepEntry& step : steps)
    if (step.has_manifest) newest_first.push_back(step);
  std::sort(newest_first.begin(), newest_first.end(),
            [](const auto& a, const auto& b) { return a.step > b.step; });
  const auto good = std::find_if(newest_first.begin(), newest_first.end(), is_good);
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
