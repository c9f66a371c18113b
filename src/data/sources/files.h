#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace titan::data {

/// Whether `path` contains `*`, `?` or `[`.
bool is_glob(const std::string& path);

/// The part of a glob before its first component with a wildcard.
std::filesystem::path glob_base(const std::string& pattern);

/// The files and folders that match, each once, in no particular order. `*`, `?` and `[...]` match within a
/// component (but not a leading dot), `**` any number of folders.
std::vector<std::filesystem::path> expand_glob(const std::string& pattern);

// ---- files

struct FileEntry {
  std::filesystem::path path;
  std::string name;  ///< relative to the user's path, so that a copy elsewhere counts as the same
  int64_t size;      ///< bytes
  int64_t modified;  ///< nanoseconds; identifies a version only on this machine
};

/// The regular files at `path`, sorted by name: the file itself, or those in a folder and its subfolders
/// without hidden ones. A glob's matches are handled the same way. From folders only files that end with one
/// of `extensions` (all if it is empty). Throws ConfigError if there are none or one can't be read.
std::vector<FileEntry> list_files(const std::string& path, const std::vector<std::string>& extensions);

/// A hash of names, sizes and samples of the contents.
uint64_t fingerprint_files(const std::vector<FileEntry>& files);

/// Reads bytes [begin, begin + count) of the file. Throws Error if it can't be read or has become shorter.
void read_range(const FileEntry& file, int64_t begin, int64_t count, std::string& bytes);

}  // namespace titan::data
