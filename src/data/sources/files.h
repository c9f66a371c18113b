#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace titan::data {

/// Whether `path` holds `*`, `?` or `[`.
bool is_glob(const std::string& path);

/// The part of a glob before its first component with a wildcard.
std::filesystem::path glob_base(const std::string& pattern);

/// The files and folders that match: `*`, `?` and `[...]` within a component (not a leading dot), `**` for
/// any number of folders. Each once, in no particular order.
std::vector<std::filesystem::path> expand_glob(const std::string& pattern);

// The files that a data set's path stands for.

struct FileEntry {
  std::filesystem::path path;
  std::string name;  ///< relative to what the user named, so that a copy elsewhere counts as the same
  int64_t size;      ///< bytes
  int64_t modified;  ///< nanoseconds; identifies a version on this machine only
};

/// The regular files that `path` stands for, sorted by name: a file itself; a folder's, recursively, without
/// hidden ones; a glob's, folders among its matches searched likewise. From folders only files whose name
/// ends with one of `extensions` (all when empty). Throws ConfigError when there are none or any can't be
/// read.
std::vector<FileEntry> list_files(const std::string& path, const std::vector<std::string>& extensions);

/// Names, sizes and samples of the contents, as one number.
uint64_t fingerprint_files(const std::vector<FileEntry>& files);

/// Bytes [begin, begin + count) of the file into `bytes`. Throws Error when it can't be read or is shorter by
/// now.
void read_range(const FileEntry& file, int64_t begin, int64_t count, std::string& bytes);

}  // namespace titan::data
