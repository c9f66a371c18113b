#pragma once

// Where documents come from. A new source is a class and a name for training.dataset:
//
//   class Recipes : public Source { ... };  // size, length, read, fingerprint
//   source_kinds().add("recipes", [](const SourceRequest& request) {
//     return std::make_shared<Recipes>(request.path);
//   });

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "titan/config/table.h"
#include "titan/core/registry.h"

namespace titan::data {

/// [data]: how documents are found, cut and dealt. The contents of a batch depend on these, not on the number
/// of ranks.
struct DataSettings {
  config::StringList extensions;      ///< extensions read in a folder (".txt"); empty: the kind's own
  std::string text_field = "text";    ///< JSON Lines: the member with a document's text
  bool check_contents = true;         ///< refuse files that are plainly something else
  std::string on_bad_line = "stop";   ///< JSON Lines: "stop" or "skip"
  std::string token_type = "uint16";  ///< stored token ids without a header: "uint16" or "uint32"
  int64_t piece_bytes = 256 << 10;    ///< longer documents are cut into pieces of this size, dealt separately
  bool shuffle = true;                ///< deal pieces in a pseudo-random order, a new one each epoch
  std::optional<int64_t> seed;        ///< for shuffling and for synthetic text; unset: debug.seed
  int64_t synthetic_documents = 4096;  ///< documents of the synthetic data set
  std::string cache_folder;            ///< for indexes; empty: {job.dump_folder}/data_cache

  uint64_t seed_or_default() const { return static_cast<uint64_t>(seed.value_or(0)); }
};
void describe(config::Table<DataSettings>& table);

/// A fixed list of texts with random access. Immutable and thread-safe, because the loader's threads share
/// it.
class Source {
 public:
  virtual ~Source() = default;

  /// The number of documents, at least 1.
  virtual int64_t size() const = 0;

  /// The bytes of document `i`. Must not read the document: dealing needs all lengths at once.
  virtual int64_t length(int64_t i) const = 0;

  /// Replaces `text` with bytes [begin, begin + count) of document `i`; the range lies in the document.
  /// Throws Error with the file's name if it can't be read or has changed since the source was built.
  virtual void read(int64_t i, int64_t begin, int64_t count, std::string& text) const = 0;

  /// Whether a read takes so little time that samples can be read before training, to estimate the number of
  /// tokens.
  virtual bool reads_fast() const { return false; }

  /// Differs between sources with different documents, and fits in a message. Equal on all ranks, and for a
  /// copy of the same files elsewhere.
  virtual std::string fingerprint() const = 0;
};

/// Runs `part` on one rank, then on all others, which find in the cache folder what the first has left there.
/// If it throws on one, all throw; nobody waits longer than `limit` for another rank's `part`. Collective.
using InTurn = std::function<void(const std::function<void()>& part, std::chrono::seconds limit)>;

/// The settings of one data set.
struct SourceRequest {
  std::string path;  ///< training.dataset_path; empty if unset
  DataSettings settings;
  std::filesystem::path cache_folder;  ///< for indexes, made when needed; empty: indexes aren't kept
  InTurn in_turn = {};                 ///< among the ranks that build this source; empty: there is one rank
};

using SourceFactory = std::function<std::shared_ptr<const Source>(const SourceRequest&)>;

/// The kinds of source by their name in the config (lower case). Built in:
///   text         a file, a folder (recursively, `data.extensions`) or a glob (`*`, `?`, `[...]`, `**`); a
///                file is a document
///   jsonl        JSON Lines files, found the same way; a line is a document
///   synthetic    made-up words from a seed, without a path
///   cpp_headers  the C++ headers of the loaded LibTorch, or of the folder in the path
Registry<SourceFactory>& source_kinds();

/// Throws ConfigError if the name is unknown, there are no files, a file can't be read, or a line is broken.
std::shared_ptr<const Source> build_source(const std::string& name, const SourceRequest& request);

}  // namespace titan::data
