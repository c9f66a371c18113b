#include "folder_calls.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <system_error>

#include "errno_text.h"
#include "titan/core/error.h"

namespace titan::detail {

namespace fs = std::filesystem;

namespace {

// By this file system, which may be in user space, or the kernel.
bool isnt_offered(int error) { return error == EINVAL || error == ENOSYS || error == EOPNOTSUPP; }

fs::file_status own_status(const fs::path& path) {
  std::error_code ignored;
  return fs::symlink_status(path, ignored);
}

}  // namespace

void sync_folder(const fs::path& folder) {
  const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) throw Error(str("cannot open ", folder.string(), ": ", errno_text(errno)));
  const int failed = ::fsync(descriptor) == 0 || isnt_offered(errno) ? 0 : errno;
  ::close(descriptor);
  if (failed != 0) throw Error(str("cannot sync ", folder.string(), ": ", errno_text(failed)));
}

void rename_folder(const fs::path& from, const fs::path& to) {
  if (::rename(from.c_str(), to.c_str()) != 0)
    throw Error(str("cannot rename ", from.string(), " to ", to.string(), ": ", errno_text(errno)));
}

bool exchange_folders(const fs::path& a, const fs::path& b) {
  if (::renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) == 0) return true;
  if (isnt_offered(errno)) return false;
  throw Error(str("cannot exchange ", a.string(), " and ", b.string(), ": ", errno_text(errno)));
}

void remove_folder(const fs::path& folder) {
  std::error_code error;
  fs::remove_all(folder, error);
  if (error) throw Error(str("cannot remove ", folder.string(), ": ", errno_text(error.value())));
}

bool is_there(const fs::path& path) { return fs::exists(own_status(path)); }
bool is_own_folder(const fs::path& path) { return own_status(path).type() == fs::file_type::directory; }
bool is_own_file(const fs::path& path) { return own_status(path).type() == fs::file_type::regular; }

}  // namespace titan::detail
