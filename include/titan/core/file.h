#pragma once

// Files that are whole or not there: everything durable is written beside its place and renamed into it.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace titan {

// Every Error names the path, the operating system's reason with its errno name, and, for writes, the bytes
// that were written.

/// The whole file as bytes. Throws Error with path and reason.
std::string read_file(const std::filesystem::path& path);

/// Writes `contents` to `path` by a temporary name in the same folder, fsync, rename, fsync of the folder.
/// On any failure the temporary is removed, an older `path` stays as it was, and an Error names path, reason
/// and bytes. A killed process may leave the temporary, `.<name>.<pid>.<n>.tmp`; nothing ever reads it.
void write_file_atomic(const std::filesystem::path& path, std::string_view contents);

/// As above, with the contents produced piece by piece: `write` is handed a sink that appends (small pieces
/// are gathered into larger writes). What `write` throws passes through after the temporary is removed.
/// `num_bytes`: how many it will append, where that is known; its space is then reserved first, and an Error
/// for a full disk says how many bytes are needed and how many are free.
using AppendBytes = std::function<void(std::span<const std::byte>)>;
void write_file_atomic(const std::filesystem::path& path,
                       const std::function<void(const AppendBytes&)>& write,
                       std::optional<int64_t> num_bytes = {});

/// Makes the folder and its parents; an Error says which part could not be made and why.
void make_folder(const std::filesystem::path& folder);

/// A file mapped read-only for its life; `bytes()` stays valid as long as the object, and moves with it.
/// Move-only. Throws Error for what isn't a readable regular file. Shrinking the file meanwhile makes reads
/// fault (SIGBUS).
class MappedFile {
 public:
  explicit MappedFile(const std::filesystem::path& path);
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();
  std::span<const std::byte> bytes() const { return {data_, size_}; }
  std::string_view text() const { return {reinterpret_cast<const char*>(data_), size_}; }

 private:
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace titan
