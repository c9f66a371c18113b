#include "titan/checkpoint/storage.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <random>
#include <system_error>

#include <torch/headeronly/version.h>

#include "checkpoint/format/stored_files.h"
#include "core/durable.h"
#include "core/file.h"
#include "core/process.h"
#include "titan/core/error.h"
#include "titan/core/log.h"

namespace titan::checkpoint {
namespace {

namespace fs = std::filesystem;

class LocalReader : public Storage::Reader {
 public:
  explicit LocalReader(const fs::path& path) : path_(path) {
    // O_NONBLOCK: opening a pipe would otherwise wait for its writer.
    do fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    while (fd_ < 0 && errno == EINTR);
    if (fd_ < 0) fail("", errno_text(errno));
    struct stat status = {};
    const int error = ::fstat(fd_, &status) == 0 ? 0 : errno;
    num_bytes_ = status.st_size;
    if (error == 0 && S_ISREG(status.st_mode)) return;
    ::close(fd_);
    fail("", error != 0 ? errno_text(error) : "not a regular file");
  }
  ~LocalReader() override { ::close(fd_); }
  LocalReader(const LocalReader&) = delete;
  LocalReader& operator=(const LocalReader&) = delete;

  int64_t num_bytes() const override { return num_bytes_; }

  void read(std::span<std::byte> into, int64_t offset) const override {
    while (!into.empty()) {
      const ssize_t count = ::pread(fd_, into.data(), into.size(), offset);
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) fail(str(" at byte ", offset), errno_text(errno));
      if (count == 0)
        throw Error(str(path_.string(), ": ends at byte ", offset, ", but had ", num_bytes_,
                        " bytes when it was opened: another process is changing it"));
      into = into.subspan(static_cast<size_t>(count));
      offset += count;
    }
  }

  void check_unchanged() const override {
    struct stat status = {};
    if (::fstat(fd_, &status) != 0) fail("", errno_text(errno));
    if (status.st_size != num_bytes_)
      throw Error(str(path_.string(), ": has ", status.st_size, " bytes, but had ", num_bytes_,
                      " when it was opened: another process is changing it"));
  }

  // There is no hint for bytes that will be read: with one, the kernel reads ahead in small pages and
  // requests, while a large read gets large ones. Loads took 1.25 times as long.
  void drop(int64_t offset, int64_t num_bytes) const override {
    ::posix_fadvise(fd_, offset, num_bytes, POSIX_FADV_DONTNEED);
  }

 private:
  [[noreturn]] void fail(const std::string& where, const std::string& reason) const {
    throw Error(str("cannot read ", path_.string(), where, ": ", reason));
  }

  fs::path path_;
  int fd_ = -1;
  int64_t num_bytes_ = 0;
};

class LocalWriter : public Storage::Writer {
 public:
  LocalWriter(const fs::path& path, int64_t num_bytes, FileCalls calls)
      : file_(path, num_bytes, std::move(calls)) {}

  void write(std::span<const std::span<const std::byte>> parts, int64_t offset) override {
    std::vector<iovec> vectors;
    vectors.reserve(parts.size());
    int64_t num_bytes = 0;
    for (const auto& part : parts) {
      vectors.push_back({const_cast<std::byte*>(part.data()), part.size()});
      num_bytes += static_cast<int64_t>(part.size());
    }
    file_.write(vectors, offset);
    file_.start_write_back(offset, num_bytes);
  }
  void finish() override { file_.finish(); }

 private:
  OutputFile file_;
};

// ---- the lock: flock, which the kernel releases with the process that held it, however it ended

class LockFile {
 public:
  explicit LockFile(const fs::path& path) : LockFile(path, O_RDWR | O_CREAT) {
    if (descriptor_ < 0)
      throw Error(str("cannot lock: cannot open ", path.string(), ": ", errno_text(errno)));
  }
  /// To look at. If it can't be opened, nothing holds it as far as this process can tell.
  static LockFile existing(const fs::path& path) { return {path, O_RDONLY}; }
  ~LockFile() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  LockFile(const LockFile&) = delete;
  LockFile& operator=(const LockFile&) = delete;

  // Returns 0 or the errno. `mode`: LOCK_EX, or LOCK_SH, which many may hold.
  int try_lock(int mode = LOCK_EX) const {
    int result = 0;
    do result = ::flock(descriptor_, mode | LOCK_NB);
    while (result != 0 && errno == EINTR);
    return result == 0 ? 0 : errno;
  }

  // For people: it doesn't matter if it can't be written.
  void write_holder() const {
    const std::string text = str("process ", ::getpid(), " on ", host_name(), "\n");
    if (::ftruncate(descriptor_, 0) != 0 || ::pwrite(descriptor_, text.data(), text.size(), 0) < 0)
      log::debug("the lock file couldn't be written");
  }

  // The text that the lock's holder wrote: shown, but not relied on.
  std::string holder() const {
    std::array<char, 320> text{};
    const ssize_t length = std::max<ssize_t>(0, ::pread(descriptor_, text.data(), text.size(), 0));
    std::string holder(text.data(), static_cast<size_t>(length));
    holder = holder.substr(0, holder.find('\n'));
    const bool readable =
        std::all_of(holder.begin(), holder.end(), [](unsigned char c) { return std::isprint(c) != 0; });
    return readable && !holder.empty() ? holder : "another process";
  }

 private:
  LockFile(const fs::path& path, int flags)
      : descriptor_(::open(path.c_str(), flags | O_CLOEXEC | O_NOFOLLOW, 0666)) {}

  int descriptor_;
};

FolderInUse in_use(const fs::path& folder, const LockFile& file) {
  return FolderInUse(str(folder.string(), " is being written to by ", file.holder(),
                         "; a folder of checkpoints has one writer at a time"));
}

bool means_no_locks(int error) {
  return error == ENOLCK || error == EOPNOTSUPP || error == ENOSYS || error == EINVAL;
}

void warn_of_no_locks(const fs::path& folder, const std::string& reason) {
  log::warning(str("the file system of ", folder.string(), " has no locks", reason,
                   ": make sure that only one run writes there; leftovers of killed runs stay"));
}

// The folder's own name must be as durable as the steps in it, and the run's folder above may be new too.
void sync_folders_above(const fs::path& folder) {
  fs::path above = fs::absolute(folder).lexically_normal();
  if (!above.has_filename()) above = above.parent_path();
  for (int level = 0; level < 2 && above.has_relative_path(); ++level) {
    above = above.parent_path();
    try {
      titan::detail::sync_folder(above);
    } catch (const Error& error) {
      log::debug(error.what());  // a folder that may not be read existed before
    }
  }
}

class LocalStorage : public Storage {
 public:
  std::vector<std::string> list(const fs::path& folder) override {
    std::vector<std::string> names;
    std::error_code error;
    fs::directory_iterator entry(folder, error);
    for (; !error && entry != fs::directory_iterator(); entry.increment(error))
      names.push_back(entry->path().filename().string());
    if (error && error != std::errc::no_such_file_or_directory)
      throw Error(str("cannot list ", folder.string(), ": ", errno_text(error.value())));
    return names;
  }

  Status status(const fs::path& path) override {
    struct stat status = {};
    if (::lstat(path.c_str(), &status) != 0) return {};
    if (S_ISREG(status.st_mode)) return {Kind::File, status.st_size};
    return {S_ISDIR(status.st_mode) ? Kind::Folder : Kind::Other};
  }

  std::unique_ptr<Reader> open(const fs::path& file) override { return std::make_unique<LocalReader>(file); }
  std::unique_ptr<Writer> create(const fs::path& file, int64_t num_bytes) override {
    return detail::local_writer(file, num_bytes);
  }
  void make_folder(const fs::path& folder) override { titan::make_folder(folder); }
  void rename(const fs::path& from, const fs::path& to) override { titan::detail::rename_folder(from, to); }
  bool exchange(const fs::path& a, const fs::path& b) override {
    return titan::detail::exchange_folders(a, b);
  }
  void remove(const fs::path& path) override { titan::detail::remove_folder(path); }
  void sync(const fs::path& folder) override { titan::detail::sync_folder(folder); }

  std::shared_ptr<const void> lock(const fs::path& folder) override {
    make_folder(folder);
    sync_folders_above(folder);
    auto file = std::make_shared<LockFile>(folder / ".lock");
    const int error = file->try_lock();
    if (error == EWOULDBLOCK) throw in_use(folder, *file);
    if (means_no_locks(error)) {
      warn_of_no_locks(folder, str(" (", errno_text(error), ")"));
      return nullptr;
    }
    if (error != 0) throw Error(str("cannot lock ", folder.string(), ": ", errno_text(error)));
    file->write_holder();
    return file;
  }

  std::string write_problem(const fs::path& folder) override {
    return ::access(folder.c_str(), W_OK | X_OK) == 0 ? "" : errno_text(errno);
  }
};

// The scheme of "s3:/bucket"; empty for a local path.
std::string scheme_of(const fs::path& path) {
  const std::string first = path.empty() ? "" : path.begin()->string();
  return first.size() > 1 && first.ends_with(':') ? first.substr(0, first.size() - 1) : "";
}

}  // namespace

std::shared_ptr<const void> Storage::lock(const fs::path& folder) {
  make_folder(folder);
  warn_of_no_locks(folder, "");
  return nullptr;
}

Registry<std::shared_ptr<Storage>>& storages() {
  static Registry<std::shared_ptr<Storage>> all("checkpoint storage");
  return all;
}

Storage& storage_of(const fs::path& path) {
  static LocalStorage local;
  return is_local(path) ? local : *storages().get(scheme_of(path));
}

bool is_local(const fs::path& path) { return scheme_of(path).empty(); }

fs::path joined(const fs::path& parent, const fs::path& folder) {
  return is_local(folder) ? parent / folder : folder;
}

fs::path normalized(const fs::path& path) {
  return (is_local(path) ? fs::absolute(path) : path).lexically_normal();
}

void require_local(const fs::path& path, const std::string& what) {
  if (!is_local(path)) throw ConfigError(str(path.string(), ": ", what, " has to be on a local path"));
}

namespace detail {

std::string read_text(const fs::path& path, int64_t most_bytes) {
  const InputFile file(path);
  TITAN_CHECK(file.num_bytes() <= most_bytes, path.string(), ": ", file.num_bytes(), " bytes; at most ",
              most_bytes, " are allowed");
  std::string text(static_cast<size_t>(file.num_bytes()), '\0');
  file.read(std::as_writable_bytes(std::span(text)), 0);
  return text;
}

void write_text(const fs::path& path, std::string_view text) {
  const auto file = storage_of(path).create(path, static_cast<int64_t>(text.size()));
  const auto bytes = std::as_bytes(std::span(text));
  file->write({&bytes, 1}, 0);
  file->finish();
}

void check_unlocked(const fs::path& folder) {
  if (!is_local(folder)) return;
  const LockFile file = LockFile::existing(folder / ".lock");
  if (file.try_lock(LOCK_SH) == EWOULDBLOCK) throw in_use(folder, file);
}

Storage::Kind kind_of(const fs::path& path) { return storage_of(path).status(path).kind; }

std::string not_a_file(const fs::path& path) {
  return detail::is_there(path) ? " isn't a regular file" : " is missing";
}

void remove_quietly(const fs::path& path) {
  try {
    storage_of(path).remove(path);
  } catch (const Error& error) {
    log::debug(error.what());
  }
}

std::unique_ptr<Storage::Writer> local_writer(const fs::path& path, int64_t num_bytes, FileCalls calls) {
  return std::make_unique<LocalWriter>(path, num_bytes, std::move(calls));
}

std::string library_text() { return titan::str("titan ", kVersion, ", torch ", TORCH_VERSION); }

std::string model_file_name(int64_t number, int64_t count) {
  if (count == 1) return "model.safetensors";
  std::array<char, 64> name{};
  std::snprintf(name.data(), name.size(), "model-%05lld-of-%05lld.safetensors",
                static_cast<long long>(number + 1), static_cast<long long>(count));
  return name.data();
}

std::string digest_problem(const fs::path& file, const std::string& digest) {
  try {
    const std::string found = digest_of(read_text(file));
    return found == digest ? "" : titan::str("has digest ", found, ", expected ", digest);
  } catch (const Error& error) {
    return error.what();
  }
}

std::string random_id() {
  constexpr const char* digits = "0123456789abcdef";
  std::random_device source;
  std::string id;
  while (id.size() < 32) id += digits[source() % 16];
  return id;
}

}  // namespace detail
}  // namespace titan::checkpoint
