#include "titan/core/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "core/durable.h"
#include "titan/core/error.h"

namespace titan {

namespace fs = std::filesystem;

namespace {

/// A regular file, open for reading.
class InputFile {
 public:
  explicit InputFile(const fs::path& path) {
    do fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    while (fd_ < 0 && errno == EINTR);
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
    return str("cannot read ", path.string(), ": ", detail::errno_text(errno));
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
    ssize_t count = ::read(file.descriptor(), contents.data() + filled, contents.size() - filled);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw Error(str(InputFile::cannot_read(path), " after ", filled, " bytes"));
    if (count == 0) break;
    filled += static_cast<size_t>(count);
  }
  contents.resize(filled);
  return contents;
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
    std::string why = error == EEXIST ? "a file of that name is in the way" : detail::errno_text(error);
    throw Error(str("cannot make folder ", folder.string(), ": ", part.string(), ": ", why));
  }
}

MappedFile::MappedFile(const fs::path& path) {
  InputFile file(path);
  size_ = file.size();
  if (size_ == 0) return;  // mmap refuses an empty mapping
  void* mapped = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file.descriptor(), 0);
  if (mapped == MAP_FAILED)
    throw Error(str("cannot map ", path.string(), " (", size_, " bytes): ", detail::errno_text(errno)));
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
