#include "core/durable.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
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

#include "core/file.h"
#include "core/json.h"
#include "core/process.h"
#include "core/units.h"
#include "titan/core/error.h"

namespace titan {

namespace fs = std::filesystem;

namespace {

/// Repeats a call that a signal interrupts.
template <class Call>
auto uninterrupted(const Call& call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

/// Takes `num_bytes` off the front of the parts; returns the parts that are left.
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

/// Whether the kernel, or a file system in user space, lacks the operation.
bool is_unsupported(int error) { return error == EINVAL || error == ENOSYS || error == EOPNOTSUPP; }

// ---- reading

/// A regular file, open for reading.
class InputFile {
 public:
  explicit InputFile(const fs::path& path) {
    fd_ = uninterrupted([&] { return ::open(path.c_str(), O_RDONLY | O_CLOEXEC); });
    struct stat status = {};
    if (fd_ < 0 || ::fstat(fd_, &status) != 0) throw Error(cannot_read(path));
    size_ = static_cast<size_t>(status.st_size);
    if (!S_ISDIR(status.st_mode)) return;
    ::close(fd_);
    throw Error(str("cannot read ", path.string(), ": it is a folder, not a file"));
  }
  ~InputFile() { ::close(fd_); }
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  int descriptor() const { return fd_; }
  size_t size() const { return size_; }

  static std::string cannot_read(const fs::path& path) {
    return str("cannot read ", path.string(), ": ", errno_text(errno));
  }

 private:
  int fd_ = -1;
  size_t size_ = 0;
};

}  // namespace

std::string read_file(const fs::path& path) {
  InputFile file(path);
  // The size is only a hint: files in /proc have 0, and a growing file has more.
  std::string contents(file.size() + 1, '\0');
  size_t filled = 0;
  while (true) {
    if (filled == contents.size()) contents.resize(2 * contents.size());
    const ssize_t count = uninterrupted(
        [&] { return ::read(file.descriptor(), contents.data() + filled, contents.size() - filled); });
    if (count < 0) throw Error(str(InputFile::cannot_read(path), " after ", filled, " bytes"));
    if (count == 0) break;
    filled += static_cast<size_t>(count);
  }
  contents.resize(filled);
  return contents;
}

MappedFile::MappedFile(const fs::path& path) {
  InputFile file(path);
  size_ = file.size();
  if (size_ == 0) return;  // mmap refuses an empty mapping
  void* mapped = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file.descriptor(), 0);
  if (mapped == MAP_FAILED)
    throw Error(str("cannot map ", path.string(), " (", size_, " bytes): ", errno_text(errno)));
  data_ = static_cast<const std::byte*>(mapped);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

// ---- files of known size

std::optional<int64_t> free_bytes_of(const fs::path& folder) {
  struct statvfs status = {};
  if (::statvfs(folder.c_str(), &status) != 0) return std::nullopt;
  return static_cast<int64_t>(status.f_bavail * status.f_frsize);
}

OutputFile::OutputFile(fs::path path, std::optional<int64_t> num_bytes, FileCalls calls, fs::path shown)
    : path_(std::move(path)),
      shown_(shown.empty() ? path_ : std::move(shown)),
      num_bytes_(num_bytes),
      calls_(std::move(calls)) {
  // Replaced, not overwritten: the name may be a link to a file of another checkpoint.
  if (::unlink(path_.c_str()) != 0 && errno != ENOENT) fail("cannot replace it", errno);
  fd_ = uninterrupted(
      [&] { return ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0666); });
  if (fd_ < 0) fail("cannot create it", errno);
  free_before_ = free_bytes_of(path_.has_parent_path() ? path_.parent_path() : fs::path("."));
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
  if (num_bytes_.value_or(0) == 0) return;
  if (uninterrupted([&] { return calls_.fallocate(fd_, 0, 0, *num_bytes_); }) == 0) return;
  if (errno != EOPNOTSUPP && errno != ENOSYS) fail("cannot reserve its space", errno);
  // Some network file systems can't reserve: check the free space instead.
  if (free_before_ && *free_before_ < *num_bytes_) fail_for_space(ENOSPC);
}

void OutputFile::write(std::span<iovec> parts, int64_t offset) {
  parts = without_front(parts, 0);  // drops empty ones
  while (!parts.empty()) {
    const ssize_t count = uninterrupted(
        [&] { return calls_.pwritev(fd_, parts.data(), static_cast<int>(parts.size()), offset); });
    if (count < 0) fail("write failed", errno);
    if (count == 0)
      throw Error(str("cannot write ", shown_.string(), ": the file system accepted no bytes at offset ",
                      offset, " and gave no reason"));
    parts = without_front(parts, static_cast<size_t>(count));
    offset += count;
    written_ += count;
  }
}

void OutputFile::start_write_back(int64_t offset, int64_t num_bytes) {
  ::sync_file_range(fd_, offset, num_bytes, SYNC_FILE_RANGE_WRITE);
}

void OutputFile::finish() {
  if (uninterrupted([&] { return calls_.fdatasync(fd_); }) != 0) fail("sync failed", errno);
  // Some file systems report failed writes only at close. The descriptor is gone in any case.
  if (calls_.close(std::exchange(fd_, -1)) != 0 && errno != EINTR) fail("close failed", errno);
  finished_ = true;
}

void OutputFile::fail(const char* what, int error) const {
  if (num_bytes_ && (error == ENOSPC || error == EDQUOT)) fail_for_space(error);
  std::string message = str("cannot write ", shown_.string(), ": ", what, ": ", errno_text(error), " after ",
                            written_.load(), " bytes");
  rlimit limit = {};
  if (num_bytes_ && error == EFBIG && ::getrlimit(RLIMIT_FSIZE, &limit) == 0 &&
      limit.rlim_cur != RLIM_INFINITY)
    message += str("; it needs ", size_text(*num_bytes_), ", but files of this process are limited to ",
                   size_text(static_cast<int64_t>(limit.rlim_cur)), " (ulimit -f)");
  throw Error(message);
}

void OutputFile::fail_for_space(int error) const {
  const std::string free = free_before_ ? str(", and ", size_text(*free_before_), " was free") : "";
  throw DiskFull(str("cannot write ", shown_.string(), ": it needs ", size_text(*num_bytes_), free, ": ",
                     errno_text(error)),
                 *num_bytes_, errno_text(error));
}

// ---- atomic files

namespace {

/// Writes an OutputFile from its beginning, in large pieces.
class Appender {
 public:
  explicit Appender(OutputFile& file) : file_(file) { buffer_.reserve(kBufferBytes); }

  void append(std::span<const std::byte> bytes) {
    if (buffer_.size() + bytes.size() > kBufferBytes) flush();
    if (bytes.size() > kBufferBytes) return write(bytes);
    buffer_.insert(buffer_.end(), bytes.begin(), bytes.end());
  }
  void flush() {
    write(buffer_);
    buffer_.clear();
  }
  int64_t num_bytes() const { return offset_; }

 private:
  static constexpr size_t kBufferBytes = 1 << 20;

  void write(std::span<const std::byte> bytes) {
    iovec part{const_cast<std::byte*>(bytes.data()), bytes.size()};  // only read
    file_.write({&part, 1}, offset_);
    offset_ += static_cast<int64_t>(bytes.size());
  }

  OutputFile& file_;
  std::vector<std::byte> buffer_;
  int64_t offset_ = 0;
};

class Deflate {
 public:
  explicit Deflate(const AppendBytes& append) : append_(append) {
    constexpr int kGzip = 16;  // a gzip header and checksum in place of zlib's
    const int result = ::deflateInit2(&stream_, Z_DEFAULT_COMPRESSION, Z_DEFLATED, MAX_WBITS + kGzip,
                                      /*memLevel=*/8, Z_DEFAULT_STRATEGY);
    TITAN_CHECK(result == Z_OK, "zlib: deflateInit2 returned ", result);
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
    stream_.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));  // zlib only reads it
    stream_.avail_in = static_cast<uInt>(text.size());
    do {
      stream_.next_out = reinterpret_cast<Bytef*>(buffer_.data());
      stream_.avail_out = static_cast<uInt>(buffer_.size());
      const int result = ::deflate(&stream_, flush);
      TITAN_INTERNAL_ASSERT(result != Z_STREAM_ERROR, "zlib: the stream is in a wrong state");
      append_(std::span(buffer_).first(buffer_.size() - stream_.avail_out));
    } while (stream_.avail_out == 0);
  }

  const AppendBytes& append_;
  z_stream stream_{};
  std::vector<std::byte> buffer_ = std::vector<std::byte>(size_t{1} << 16);
};

fs::path folder_of(const fs::path& path) {
  return path.has_parent_path() ? path.parent_path() : fs::path(".");
}

fs::path temporary_name(const fs::path& path) {
  static std::atomic<uint64_t> counter{0};
  return folder_of(path) / str(".", path.filename().string(), ".", ::getpid(), ".", counter++, ".tmp");
}

}  // namespace

AtomicFile::AtomicFile(fs::path path, std::optional<int64_t> num_bytes)
    : path_(std::move(path)), temporary_(temporary_name(path_)), file_(temporary_, num_bytes, {}, path_) {}

void AtomicFile::commit() {
  file_.finish();
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) {
    const int error = errno;
    ::unlink(temporary_.c_str());
    throw Error(str("cannot write ", path_.string(), ": rename failed: ", errno_text(error)));
  }
  detail::sync_folder(folder_of(path_));
}

void write_file_atomic(const fs::path& path, const std::function<void(const AppendBytes&)>& write,
                       std::optional<int64_t> num_bytes) {
  AtomicFile file(path, num_bytes);
  Appender appender(file.file());
  write([&](std::span<const std::byte> bytes) { appender.append(bytes); });
  appender.flush();
  TITAN_CHECK(!num_bytes || appender.num_bytes() == *num_bytes, path.string(), ": wrote ",
              appender.num_bytes(), " of ", *num_bytes, " bytes");
  file.commit();
}

void write_file_atomic(const fs::path& path, std::string_view contents) {
  write_file_atomic(
      path, [&](const AppendBytes& append) { append(std::as_bytes(std::span(contents))); },
      static_cast<int64_t>(contents.size()));
}

void write_gzip_atomic(const fs::path& path, std::span<const std::string_view> pieces) {
  write_file_atomic(path, [&](const AppendBytes& append) {
    Deflate deflate(append);
    for (const std::string_view piece : pieces) deflate.add(piece);
    deflate.finish();
  });
}

// ---- logs

AppendFile::AppendFile(fs::path path, bool truncate) : path_(std::move(path)) {
  make_folder(path_.parent_path());
  file_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | (truncate ? O_TRUNC : 0), 0644);
  if (file_ < 0) fail("open");
}

AppendFile::~AppendFile() {
  if (file_ >= 0) ::close(file_);
}

void AppendFile::append(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t count = uninterrupted([&] { return ::write(file_, bytes.data(), bytes.size()); });
    if (count < 0) fail("write to");
    bytes.remove_prefix(static_cast<size_t>(count));
  }
}

void AppendFile::sync() {
  if (::fdatasync(file_) != 0 && errno != EROFS && !is_unsupported(errno)) fail("sync");
}

void AppendFile::fail(const char* operation) const {
  throw Error(str("cannot ", operation, " the log ", path_.string(), ": ", errno_text(errno)));
}

int64_t keep_rows_up_to(int64_t step, const fs::path& path) {
  if (!fs::exists(path)) return 0;
  int64_t num_broken = 0;
  std::istringstream lines(read_file(path));
  std::string kept;
  for (std::string line; std::getline(lines, line);) {
    const bool is_whole = !lines.eof();  // a killed run may leave half a row
    const auto row = parse_json(line);
    const bool has_step = row.is_object() && row.contains("step") && row["step"].is_number_integer();
    if (!is_whole || !has_step)
      ++num_broken;
    else if (row["step"].get<int64_t>() <= step)
      kept += line + "\n";
  }
  write_file_atomic(path, kept);
  return num_broken;
}

// ---- folders

std::optional<fs::path> keep_earlier_file(const fs::path& path) {
  std::error_code error;
  if (!fs::is_regular_file(path, error)) return std::nullopt;
  const std::string name = path.filename().string();
  const size_t stem = std::min(name.find('.', 1), name.size());
  fs::path kept = path;
  for (int number = 1; fs::exists(kept, error); ++number)
    kept.replace_filename(str(name.substr(0, stem), ".", number, name.substr(stem)));
  fs::rename(path, kept, error);
  TITAN_CHECK(!error, "cannot rename ", path.string(), " to ", kept.string(), ": ", error.message());
  return kept;
}

void make_folder(const fs::path& folder) {
  fs::path part;
  for (const fs::path& name : folder) {
    part /= name;
    std::error_code ignored;
    if (fs::is_directory(part, ignored)) continue;
    if (::mkdir(part.c_str(), 0777) == 0) continue;
    int error = errno;  // another rank may have made it in the meantime
    if (fs::is_directory(part, ignored)) continue;
    std::string why = error == EEXIST ? "a file of that name is in the way" : errno_text(error);
    throw Error(str("cannot make folder ", folder.string(), ": ", part.string(), ": ", why));
  }
}

namespace detail {

void sync_folder(const fs::path& folder) {
  const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) throw Error(str("cannot open ", folder.string(), ": ", errno_text(errno)));
  const int error = ::fsync(descriptor) == 0 || is_unsupported(errno) ? 0 : errno;
  ::close(descriptor);
  if (error != 0) throw Error(str("cannot sync ", folder.string(), ": ", errno_text(error)));
}

void rename_folder(const fs::path& from, const fs::path& to) {
  if (::rename(from.c_str(), to.c_str()) != 0)
    throw Error(str("cannot rename ", from.string(), " to ", to.string(), ": ", errno_text(errno)));
}

bool exchange_folders(const fs::path& a, const fs::path& b) {
  if (::renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) == 0) return true;
  if (is_unsupported(errno)) return false;
  throw Error(str("cannot exchange ", a.string(), " and ", b.string(), ": ", errno_text(errno)));
}

void remove_folder(const fs::path& folder) {
  std::error_code error;
  fs::remove_all(folder, error);
  if (error) throw Error(str("cannot remove ", folder.string(), ": ", errno_text(error.value())));
}

bool is_there(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(fs::symlink_status(path, ignored));
}

}  // namespace detail
}  // namespace titan
