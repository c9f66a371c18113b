#include "core/durable.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>
#include <zlib.h>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <limits>
#include <sstream>
#include <system_error>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "titan/core/error.h"
#include "titan/core/file.h"

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

namespace titan::train {

AppendFile::AppendFile(std::filesystem::path path, bool truncate) : path_(std::move(path)) {
  make_folder(path_.parent_path());
  file_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | (truncate ? O_TRUNC : 0), 0644);
  if (file_ < 0) fail("open");
}

AppendFile::~AppendFile() {
  if (file_ >= 0) ::close(file_);
}

void AppendFile::append(std::string_view bytes) {
  while (!bytes.empty()) {
    ssize_t written = ::write(file_, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail("write to");
    bytes.remove_prefix(static_cast<size_t>(written));
  }
}

void AppendFile::sync() {
  if (::fsync(file_) != 0 && errno != EINVAL && errno != EROFS) fail("sync");
}

void AppendFile::fail(const char* operation) const {
  throw Error(str("can't ", operation, " the log ", path_.string(), ": ", std::strerror(errno)));
}

void keep_rows_up_to(int64_t step, const std::filesystem::path& path) {
  if (!std::filesystem::exists(path)) return;
  std::istringstream lines(read_file(path));
  std::string kept;
  for (std::string line; std::getline(lines, line);) {
    const bool is_whole = !lines.eof();  // a killed run may leave half a row
    const auto row = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    const bool has_step = row.is_object() && row.contains("step") && row["step"].is_number_integer();
    if (is_whole && has_step && row["step"].get<int64_t>() <= step) kept += line + "\n";
  }
  write_file_atomic(path, kept);
}

namespace {

class Deflate {
 public:
  explicit Deflate(const AppendBytes& append) : append_(append) {
    constexpr int kGzip = 16;  // a gzip header and checksum in place of zlib's
    const int result = ::deflateInit2(&stream_, Z_DEFAULT_COMPRESSION, Z_DEFLATED, MAX_WBITS + kGzip,
                                      /*memLevel=*/8, Z_DEFAULT_STRATEGY);
    TITAN_CHECK(result == Z_OK, "zlib: deflateInit2 gave ", result);
  }
  ~Deflate() { ::deflateEnd(&stream_); }
  Deflate(const Deflate&) = delete;
  Deflate& operator=(const Deflate&) = delete;

  void add(std::string_view text) {
    constexpr size_t kMost = std::numeric_limits<uInt>::max();
    for (; !text.empty(); text.remove_prefix(std::min(kMost, text.size())))
      run(text.substr(0, kMost), Z_NO_FLUSH);
  }
  void finish() { run({}, Z_FINISH); }

 private:
  void run(std::string_view text, int flush) {
    stream_.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));  // zlib doesn't write there
    stream_.avail_in = static_cast<uInt>(text.size());
    do {
      stream_.next_out = reinterpret_cast<Bytef*>(buffer_.data());
      stream_.avail_out = static_cast<uInt>(buffer_.size());
      const int result = ::deflate(&stream_, flush);
      TITAN_INTERNAL_ASSERT(result != Z_STREAM_ERROR, "zlib: a stream in a wrong state");
      append_(std::span(buffer_).first(buffer_.size() - stream_.avail_out));
    } while (stream_.avail_out == 0);
  }

  const AppendBytes& append_;
  z_stream stream_{};
  std::vector<std::byte> buffer_ = std::vector<std::byte>(size_t{1} << 16);
};

}  // namespace

void write_gzip_atomic(const std::filesystem::path& path, std::span<const std::string_view> pieces) {
  write_file_atomic(path, [&](const AppendBytes& append) {
    Deflate deflate(append);
    for (const std::string_view piece : pieces) deflate.add(piece);
    deflate.finish();
  });
}

}  // namespace titan::train
