#pragma once

// The folder of a model alone while it is written: which tensors go into which file, and everything else that
// belongs into it.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "checkpoint/format/rank_file.h"
#include "titan/checkpoint/hugging_face.h"
#include "titan/checkpoint/safetensors.h"

namespace titan::detail {

/// entries[begin, end) go into one file.
struct Shard {
  size_t begin = 0, end = 0;
  int64_t bytes = 0;
};

struct ModelFiles {
  const HfModel* hf = nullptr;            // null: our names, and no config.json
  std::vector<SafetensorsEntry> entries;  // under their names in the files
  std::vector<Shard> shards;

  size_t num_files() const { return shards.size(); }
  std::string name(size_t file) const;
  std::vector<SafetensorsEntry> in_file(size_t file) const;
  SafetensorsMetadata metadata() const;
};

/// Shards in order, each of at most `shard_bytes`, or with a single larger tensor.
std::vector<Shard> cut(const std::vector<SafetensorsEntry>& entries, int64_t shard_bytes);
/// At most `num_files`, the largest of them as small as possible.
std::vector<Shard> cut_evenly(const std::vector<SafetensorsEntry>& entries, int64_t num_files);

/// Writes the rest of a folder whose weights are written: the index, config.json, tokenizer, and at last the
/// manifest. Throws Error if a file of weights isn't there in its full size.
void finish_model_folder(const std::filesystem::path& folder, const ModelFiles& files,
                         const std::vector<checkpoint::WrittenFile>& written, const HfWriteOptions& options);

/// Whether a folder's weights have Hugging Face's names: the manifest says so, or without one, a name begins
/// with "model." as all of theirs but lm_head's do. Throws Error.
bool has_hf_names(const std::filesystem::path& folder);

/// Parts of a tensor in order, each of about `piece_bytes`. Rows are reordered within a head, so with
/// `rotary_head_dim` they are whole heads.
std::vector<Box> pieces_of(const SafetensorsEntry& tensor, int64_t rotary_head_dim, int64_t piece_bytes);

/// A folder that appears whole or not at all, like a file of write_file_atomic. It is made next to its final
/// place under a temporary name, `.NAME.PID.tmp`. The destructor removes it unless commit() renamed it.
class NewFolder {
 public:
  explicit NewFolder(const std::filesystem::path& path);
  ~NewFolder();
  NewFolder(const NewFolder&) = delete;
  NewFolder& operator=(const NewFolder&) = delete;

  const std::filesystem::path& path() const { return temporary_; }
  /// Renames the folder and syncs. An existing folder of that name is kept as NAME.old, NAME.old.2, ...
  void commit();

 private:
  std::filesystem::path free_name() const;

  std::filesystem::path final_, temporary_;
  bool committed_ = false;
};

}  // namespace titan::detail
