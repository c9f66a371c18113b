#include "checkpoint/format/input_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cerrno>

#include "core/durable.h"
#include "titan/core/error.h"

namespace titan::checkpoint::detail {

using titan::detail::errno_text;

InputFile::InputFile(const std::filesystem::path& path) : path_(path) {
  // Opening a pipe would else wait for its writer.
  do fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  while (fd_ < 0 && errno == EINTR);
  if (fd_ < 0) throw Error(str("cannot read ", path.string(), ": ", errno_text(errno)));
  struct stat status = {};
  const int error = ::fstat(fd_, &status) == 0 ? 0 : errno;
  if (error == 0 && S_ISREG(status.st_mode)) {
    num_bytes_ = status.st_size;
    return;
  }
  ::close(fd_);
  throw Error(
      str("cannot read ", path.string(), ": ", error != 0 ? errno_text(error) : "not a regular file"));
}

InputFile::~InputFile() { ::close(fd_); }

void InputFile::read(std::span<std::byte> into, int64_t offset) const {
  while (!into.empty()) {
    const ssize_t count = ::pread(fd_, into.data(), into.size(), offset);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0)
      throw Error(str("cannot read ", path_.string(), " at byte ", offset, ": ", errno_text(errno)));
    if (count == 0)
      throw Error(str(path_.string(), ": ends at byte ", offset, ", and had ", num_bytes_,
                      " bytes when it was opened: somebody changes it"));
    bytes_read_ += count;
    into = into.subspan(static_cast<size_t>(count));
    offset += count;
  }
}

void InputFile::check_size() const {
  struct stat status = {};
  if (::fstat(fd_, &status) != 0) throw Error(str("cannot read ", path_.string(), ": ", errno_text(errno)));
  if (status.st_size != num_bytes_)
    throw Error(str(path_.string(), ": has ", status.st_size, " bytes, and had ", num_bytes_,
                    " when it was opened: somebody changes it"));
}

void InputFile::drop(int64_t offset, int64_t num_bytes) const {
  ::posix_fadvise(fd_, offset, num_bytes, POSIX_FADV_DONTNEED);
}

}  // namespace titan::checkpoint::detail
