// FolderLock: flock, which the kernel gives back with the process that had it, however it ended.

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>

#include "errno_text.h"
#include "folder_calls.h"
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

}  // namespace titan::checkpoint
