#include "output_file.h"

#include <sys/resource.h>
#include <sys/statvfs.h>

#include <cerrno>
#include <utility>

#include "errno_text.h"
#include "titan/core/error.h"

namespace titan::checkpoint::detail {
namespace {

using titan::detail::errno_text;

// Calls until a signal doesn't interrupt it.
template <class Call>
auto uninterrupted(const Call& call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

// Takes `num_bytes` from the front of the parts; returns the parts that are left.
std::span<iovec> without_front(std::span<iovec> parts, size_t num_bytes) {
  while (!parts.empty() && num_bytes >= parts.front().iov_len) {
    num_bytes -= parts.front().iov_len;
    parts = parts.subspan(1);
  }
  if (!parts.empty()) {
    parts.front().iov_base = static_cast<char*>(parts.front().iov_base) + num_bytes;
    parts.front().iov_len -= num_bytes;
  }
  return parts;
}

}  // namespace

OutputFile::OutputFile(const std::filesystem::path& path, int64_t num_bytes, FileCalls calls)
    : path_(path), num_bytes_(num_bytes), calls_(std::move(calls)) {
  // A file of that name may be a link to another checkpoint's: it isn't written over.
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) fail("cannot replace it", errno);
  fd_ = uninterrupted(
      [&] { return ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0666); });
  if (fd_ < 0) fail("cannot create it", errno);
  try {
    reserve();
  } catch (...) {
    ::close(fd_);
    ::unlink(path_.c_str());
    throw;
  }
}

OutputFile::~OutputFile() {
  if (finished_) return;
  if (fd_ >= 0) ::close(fd_);
  ::unlink(path_.c_str());
}

void OutputFile::reserve() {
  if (uninterrupted([&] { return calls_.fallocate(fd_, 0, 0, num_bytes_); }) == 0) return;
  // Some network file systems can't; then the free space is all that is known.
  if (errno == EOPNOTSUPP || errno == ENOSYS) return check_free_space();
  fail("cannot reserve its space", errno);
}

void OutputFile::check_free_space() {
  struct statvfs status = {};
  if (::fstatvfs(fd_, &status) != 0) return;  // writing will tell
  const auto blocks = (static_cast<uint64_t>(num_bytes_) + status.f_frsize - 1) / status.f_frsize;
  if (blocks > status.f_bavail) fail_for_space(ENOSPC);
}

void OutputFile::write(std::span<iovec> parts, int64_t offset) {
  parts = without_front(parts, 0);  // empty ones
  while (!parts.empty()) {
    const ssize_t count = uninterrupted(
        [&] { return calls_.pwritev(fd_, parts.data(), static_cast<int>(parts.size()), offset); });
    if (count < 0) fail("write failed", errno);
    if (count == 0)
      throw Error(str("cannot write ", path_.string(), ": the file system takes no bytes at ", offset, " of ",
                      num_bytes_, " and gives no reason"));
    parts = without_front(parts, static_cast<size_t>(count));
    offset += count;
  }
}

void OutputFile::start_write_back(int64_t offset, int64_t num_bytes) {
  ::sync_file_range(fd_, offset, num_bytes, SYNC_FILE_RANGE_WRITE);
}

void OutputFile::finish() {
  if (uninterrupted([&] { return calls_.fdatasync(fd_); }) != 0) fail("sync failed", errno);
  // Whatever close returns, the descriptor is gone. Some file systems report only here what they couldn't
  // write.
  if (calls_.close(std::exchange(fd_, -1)) != 0 && errno != EINTR) fail("close failed", errno);
  finished_ = true;
}

void OutputFile::fail(const char* what, int error) {
  if (error == ENOSPC || error == EDQUOT) fail_for_space(error);
  std::string message = str("cannot write ", path_.string(), ": ", what, ": ", errno_text(error));
  rlimit limit = {};
  if (error == EFBIG && ::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
    message += str("; ", num_bytes_, " bytes are needed, this process may write files of ", limit.rlim_cur,
                   " (ulimit -f)");
  throw Error(message);
}

void OutputFile::fail_for_space(int error) {
  struct statvfs status = {};
  std::string free = "an unknown number of";
  if (::statvfs(path_.parent_path().empty() ? "." : path_.parent_path().c_str(), &status) == 0)
    free = str(static_cast<uint64_t>(status.f_bavail) * status.f_frsize);
  throw Error(str("cannot write ", path_.string(), ": ", num_bytes_, " bytes are needed, ", free,
                  " bytes are free: ", errno_text(error)));
}

}  // namespace titan::checkpoint::detail
