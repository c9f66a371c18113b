#pragma once

// Where the documents of JSON Lines files are. Building it reads everything once; the cache folder keeps it.

#include <optional>
#include <vector>

#include "core/file.h"
#include "data/sources/files.h"

namespace titan::data {

/// One document: a line of a file.
struct LineEntry {
  int64_t offset;      ///< of the line's first byte
  int64_t line_bytes;  ///< without the line end
  int64_t text_bytes;  ///< of the decoded text
  int32_t file;
  int32_t unused = 0;
};

struct LineIndexRequest {
  std::vector<FileEntry> files;
  std::string text_field;
  bool skip_bad_lines = false;
  std::filesystem::path cache_folder;  ///< empty: the index isn't kept
};

/// Immutable. Read from the cache if that is intact and was made from the same files (path, size, time),
/// member and rule; otherwise built from the files.
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
  void build(const LineIndexRequest& request);
  void save(const std::filesystem::path& path, uint64_t key) const;

  std::optional<MappedFile> mapped_;
  std::vector<LineEntry> built_;
  std::span<const LineEntry> entries_;
};

/// The string member `text_field` of a line's object. Otherwise nothing, and `problem` says why.
std::optional<std::string> text_of_line(std::string_view line, const std::string& text_field,
                                        std::string& problem);

}  // namespace titan::data
