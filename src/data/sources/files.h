#pragma once

// The files of a data set, and the documents in JSON Lines files.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/file.h"
#include "titan/data/source.h"

namespace titan::data {

/// Whether `path` contains `*`, `?` or `[`.
bool is_glob(const std::string& path);

/// The files and folders that match, each once, in no particular order. `*`, `?` and `[...]` match within a
/// component (but not a leading dot), `**` any number of folders.
std::vector<std::filesystem::path> expand_glob(const std::string& pattern);

struct FileEntry {
  std::filesystem::path path;
  std::string name;  ///< relative to the user's path, so that a copy elsewhere counts as the same
  int64_t size;      ///< bytes
  int64_t modified;  ///< nanoseconds; identifies a version only on this machine
};

/// The regular files at `path`, sorted by name: the file itself, or those in a folder and its subfolders
/// without hidden ones. A glob's matches are handled the same way. In folders, only files that end with one
/// of `extensions` (all if it is empty) count. Throws ConfigError if there are none or one can't be read.
std::vector<FileEntry> list_files(const std::string& path, const std::vector<std::string>& extensions);

/// Throws what building the built-in source `kind` throws for the names, sizes and first bytes of its files.
void check_files(const std::string& kind, const SourceRequest& request);

/// The fingerprint of the built-in source `kind`, without reading all files. The number of documents in JSON
/// Lines is taken from `before`, an earlier fingerprint; of a user's kind, all is.
std::string quick_fingerprint(const std::string& kind, const SourceRequest& request, std::string_view before);

int64_t total_bytes(const std::vector<FileEntry>& files);

/// A hash of names, sizes and samples of the contents.
uint64_t fingerprint_files(const std::vector<FileEntry>& files);

/// Reads bytes [begin, begin + count) of the file. Throws Error if it can't be read or has become shorter.
void read_range(const FileEntry& file, int64_t begin, int64_t count, std::string& bytes);

// ---- the index of the documents in JSON Lines files: building it reads every file once; a cache keeps it

/// One document: a line of a file.
struct LineEntry {
  int64_t offset;      ///< the line's first byte in the file
  int64_t line_bytes;  ///< without the line end
  int64_t text_bytes;  ///< after decoding
  int32_t file;
  int32_t unused = 0;
};

struct LineIndexRequest {
  std::vector<FileEntry> files;
  std::string text_field;
  bool skip_bad_lines = false;
  std::filesystem::path cache_folder;  ///< empty: the index isn't kept
  InTurn in_turn = {};                 ///< as in SourceRequest; not used if the index isn't kept
};

/// Immutable. Read from the cache if that is intact and was made from the same files (path, size, time) with
/// the same settings; otherwise built from the files.
class LineIndex {
 public:
  /// Throws ConfigError with file:line for a broken line, unless such lines are skipped, and if no document
  /// is left.
  explicit LineIndex(const LineIndexRequest& request);

  int64_t size() const { return static_cast<int64_t>(entries_.size()); }
  const LineEntry& operator[](int64_t i) const { return entries_[i]; }
  bool was_cached() const { return mapped_.has_value(); }

 private:
  bool load(const std::filesystem::path& path, uint64_t key);
  void save(const std::filesystem::path& path, uint64_t key) const;

  std::optional<MappedFile> mapped_;
  std::vector<LineEntry> built_;
  std::span<const LineEntry> entries_;
};

/// Returns the string member `text_field` of a line's object, or nothing; then `problem` says why.
std::optional<std::string> text_of_line(std::string_view line, const std::string& text_field,
                                        std::string& problem);

}  // namespace titan::data
