#pragma once

// Where documents come from.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>

#include "titan/core/registry.h"
#include "titan/data/settings.h"

namespace titan::data {

/// A fixed list of texts with random access. Immutable and thread-safe: the loader's threads share one.
class Source {
 public:
  virtual ~Source() = default;

  /// How many documents there are; at least 1.
  virtual int64_t size() const = 0;

  /// Bytes of the text of document `i`. Known without reading it, because dealing needs all lengths at once.
  virtual int64_t length(int64_t i) const = 0;

  /// Replaces `text` by bytes [begin, begin + count) of document `i`; the range lies within the document.
  /// Throws Error, with the file's name, when it can't be read or has changed since the source was built.
  virtual void read(int64_t i, int64_t begin, int64_t count, std::string& text) const = 0;

  /// Differs between sources whose documents differ; short enough for a message. Equal on all ranks, and for
  /// a copy of the same files elsewhere.
  virtual std::string fingerprint() const = 0;
};

/// What a config says about a data set.
struct SourceRequest {
  std::string path;  ///< training.dataset_path; empty when unset
  DataSettings settings;
  std::filesystem::path cache_folder;  ///< for indexes; made when needed. Empty: indexes aren't kept
};

using SourceFactory = std::function<std::shared_ptr<const Source>(const SourceRequest&)>;

/// The kinds of source by their config name (lower case). Built in:
///   text         a file, a folder (recursively, `data.extensions`) or a glob (`*`, `?`, `[...]`, `**`); a
///   file is a document jsonl        the same, of JSON Lines files; a line is a document synthetic    made-up
///   words, seeded; needs no path cpp_headers  text over the C++ headers that ship with LibTorch; a path
///   replaces the folder
/// A user adds one with `source_kinds().add("mine", factory)`.
Registry<SourceFactory>& source_kinds();

/// Throws ConfigError when the name is unknown, there are no files, one can't be read, or a line is broken.
std::shared_ptr<const Source> build_source(const std::string& name, const SourceRequest& request);

}  // namespace titan::data
