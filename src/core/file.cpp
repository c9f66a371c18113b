#include "titan/core/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include "titan/core/error.h"

namespace titan {
namespace {

namespace fs = std::filesystem;

/// "No space left on device (ENOSPC)".
std::string reason(int error) {
  const char* name = strerrorname_np(error);
  return str(std::strerror(error), " (", name != nullptr ? name : "unknown errno", ")");
}

/// A file descriptor that closes itself.
class Descriptor {
 public:
  Descriptor(const fs::path& path, int flags, mode_t mode = 0) {
    do fd_ = ::open(path.c_str(), flags | O_CLOEXEC, mode);
    while (fd_ < 0 && errno == EINTR);
  }
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&&) = delete;
  ~Descriptor() {
    if (ok()) close();
  }

  bool ok() const { return fd_ >= 0; }
  int get() const { return fd_; }
  /// False when closing reports a delayed write error (NFS, quotas); errno says which.
  bool close() { return ::close(std::exchange(fd_, -1)) == 0; }

 private:
  int fd_ = -1;
};

size_t size_of_regular_file(const Descriptor& file, const fs::path& path) {
  struct stat status = {};
  if (::fstat(file.get(), &status) != 0) throw Error(str("cannot read ", path.string(), ": ", reason(errno)));
  if (S_ISDIR(status.st_mode))
    throw Error(str("cannot read ", path.string(), ": it is a folder, not a file"));
  return static_cast<size_t>(status.st_size);
}

Descriptor open_to_read(const fs::path& path) {
  Descriptor file(path, O_RDONLY);
  if (!file.ok()) throw Error(str("cannot read ", path.string(), ": ", reason(errno)));
  return file;
}

fs::path folder_of(const fs::path& path) {
  return path.has_parent_path() ? path.parent_path() : fs::path(".");
}

fs::path temporary_beside(const fs::path& path) {
  static std::atomic<uint64_t> counter{0};
  return folder_of(path) / str(".", path.filename().string(), ".", ::getpid(), ".", counter++, ".tmp");
}

/// A file under a temporary name until commit(); without it, the destructor removes it.
class PendingFile {
 public:
  /// `num_bytes`: of the whole file, where that is known.
  PendingFile(const fs::path& path, std::optional<int64_t> num_bytes)
      : path_(path),
        temporary_(temporary_beside(path)),
        file_(temporary_, O_WRONLY | O_CREAT | O_EXCL, 0666),
        num_bytes_(num_bytes) {
    if (!file_.ok()) fail("cannot create it");
    try {
      reserve();
    } catch (...) {
      ::unlink(temporary_.c_str());
      throw;
    }
    buffer_.reserve(kBufferBytes);
  }
  ~PendingFile() {
    if (!committed_) ::unlink(temporary_.c_str());
  }

  void append(std::span<const std::byte> bytes) {
    if (buffer_.size() + bytes.size() > kBufferBytes) flush();
    if (bytes.size() > kBufferBytes)
      return write_through(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    buffer_.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }

  void commit() {
    flush();
    TITAN_CHECK(!num_bytes_ || written_ == static_cast<size_t>(*num_bytes_), path_.string(), ": ", written_,
                " bytes were written of ", *num_bytes_);
    if (::fsync(file_.get()) != 0) fail("sync failed");
    if (!file_.close()) fail("close failed");
    if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail("rename failed");
    committed_ = true;
    sync_folder();
  }

 private:
  static constexpr size_t kBufferBytes = 1 << 20;

  /// A disk without room says so before anything is written. Some network file systems can't reserve.
  void reserve() {
    if (!num_bytes_ || *num_bytes_ < static_cast<int64_t>(kBufferBytes)) return;
    int result = 0;
    do result = ::fallocate(file_.get(), 0, 0, *num_bytes_);
    while (result != 0 && errno == EINTR);
    if (result != 0 && errno != EOPNOTSUPP && errno != ENOSYS) fail("cannot reserve its space");
  }

  void flush() {
    write_through(buffer_.data(), buffer_.size());
    buffer_.clear();
  }

  void write_through(const char* data, size_t size) {
    while (size > 0) {
      ssize_t count = ::write(file_.get(), data, size);
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) fail("write failed");
      data += count;
      size -= static_cast<size_t>(count);
      written_ += static_cast<size_t>(count);
    }
  }

  /// The rename itself is durable only when the folder is. Some file systems can't sync a folder (EINVAL):
  /// theirs is.
  void sync_folder() {
    Descriptor folder(folder_of(path_), O_RDONLY | O_DIRECTORY);
    if (!folder.ok() || (::fsync(folder.get()) != 0 && errno != EINVAL)) fail("sync of its folder failed");
  }

  [[noreturn]] void fail(const char* what) {
    const int error = errno;
    std::string message =
        str("cannot write ", path_.string(), ": ", what, ": ", reason(error), " after ", written_, " bytes");
    if (num_bytes_ && (error == ENOSPC || error == EDQUOT)) {
      struct statvfs status = {};
      const bool known = ::statvfs(folder_of(path_).c_str(), &status) == 0;
      message +=
          str("; ", *num_bytes_, " bytes are needed, ",
              known ? str(static_cast<uint64_t>(status.f_bavail) * status.f_frsize) : "an unknown number of",
              " bytes are free");
    }
    throw Error(message);
  }

  fs::path path_;
  fs::path temporary_;
  Descriptor file_;
  std::string buffer_;
  std::optional<int64_t> num_bytes_;
  size_t written_ = 0;
  bool committed_ = false;
};

}  // namespace

std::string read_file(const fs::path& path) {
  Descriptor file = open_to_read(path);
  // The size is a hint only: files in /proc say 0, and a growing file has more.
  std::string contents(size_of_regular_file(file, path) + 1, '\0');
  size_t filled = 0;
  while (true) {
    if (filled == contents.size()) contents.resize(2 * contents.size());
    ssize_t count = ::read(file.get(), contents.data() + filled, contents.size() - filled);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0)
      throw Error(str("cannot read ", path.string(), ": ", reason(errno), " after ", filled, " bytes"));
    if (count == 0) break;
    filled += static_cast<size_t>(count);
  }
  contents.resize(filled);
  return contents;
}

void write_file_atomic(const fs::path& path, std::string_view contents) {
  write_file_atomic(
      path, [&](const AppendBytes& append) { append(std::as_bytes(std::span(contents))); },
      static_cast<int64_t>(contents.size()));
}

void write_file_atomic(const fs::path& path, const std::function<void(const AppendBytes&)>& write,
                       std::optional<int64_t> num_bytes) {
  PendingFile file(path, num_bytes);
  write([&](std::span<const std::byte> bytes) { file.append(bytes); });
  file.commit();
}

void make_folder(const fs::path& folder) {
  fs::path part;
  for (const fs::path& name : folder) {
    part /= name;
    std::error_code ignored;
    if (fs::is_directory(part, ignored)) continue;
    if (::mkdir(part.c_str(), 0777) == 0) continue;
    int error = errno;  // another rank may have made it meanwhile
    if (fs::is_directory(part, ignored)) continue;
    std::string why = error == EEXIST ? "a file of that name is in the way" : reason(error);
    throw Error(str("cannot make folder ", folder.string(), ": ", part.string(), ": ", why));
  }
}

MappedFile::MappedFile(const fs::path& path) {
  Descriptor file = open_to_read(path);
  size_ = size_of_regular_file(file, path);
  if (size_ == 0) return;  // an empty mapping is an error of mmap's
  void* mapped = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file.get(), 0);
  if (mapped == MAP_FAILED)
    throw Error(str("cannot map ", path.string(), " (", size_, " bytes): ", reason(errno)));
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

}  // namespace titan
