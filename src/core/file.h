#pragma once

// Reading, mapping and writing whole files. A written file is complete or absent: it gets a temporary name
// and is renamed once it is on disk. Every Error names the path and the reason, with its errno name.
//
//   write_file_atomic("runs/1/notes.txt", "lr 3e-4 was too high\n");
//   std::string notes = read_file("runs/1/notes.txt");
//   MappedFile tokens("train.bin");  // tokens.bytes() until it goes out of scope

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace titan {

std::string read_file(const std::filesystem::path& path);

/// Writes `contents` to a temporary name in the same folder, syncs it, renames it to `path` and syncs the
/// folder. On any failure the temporary is removed and an older `path` stays. A killed process may leave the
/// temporary, `.<name>.<pid>.<n>.tmp`; nothing reads it.
void write_file_atomic(const std::filesystem::path& path, std::string_view contents);

/// The same for contents in pieces: `write` gets a function that appends them (small pieces are gathered into
/// larger writes). An exception from `write` passes through after the temporary is removed. If `num_bytes` is
/// given, that space is reserved first, and a full disk throws DiskFull (core/durable.h).
using AppendBytes = std::function<void(std::span<const std::byte>)>;
void write_file_atomic(const std::filesystem::path& path,
                       const std::function<void(const AppendBytes&)>& write,
                       std::optional<int64_t> num_bytes = {});

/// If `path` exists, renames it to make room for another: "config.toml" becomes "config.1.toml", or the next number that
/// is free. Returns the new name; nullopt: nothing was there.
std::optional<std::filesystem::path> keep_earlier_file(const std::filesystem::path& path);

/// Makes the folder and its parents; an Error names the part that could not be made.
void make_folder(const std::filesystem::path& folder);

/// A file mapped read-only; bytes() is valid as long as the object lives, and moves with it. Throws Error
/// unless it is a readable regular file. Reads fault (SIGBUS) if the file shrinks while it is mapped.
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
