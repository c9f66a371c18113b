#pragma once

// A Hugging Face folder on disk: config.json, and either model.safetensors or shards with
// model.safetensors.index.json. It may come from a stranger: what the index says is checked against the
// shards' own headers before anything is read by it.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include "titan/checkpoint/hugging_face.h"
#include "titan/checkpoint/safetensors.h"

namespace titan {

/// config.json of a folder. Throws ConfigError that names the file and what is wrong with it.
HfConfig read_hf_config(const std::filesystem::path& folder);

/// Where the configs of the same model have to agree and don't: all but the longest sequence, which is the
/// training's. A line each: "FOLDER/config.json: hidden_size is 64, the configured model's is 128".
std::vector<std::string> config_differences(const HfModel& found, const HfModel& configured,
                                            const std::filesystem::path& folder);

/// The weights of a folder, memory-mapped: opening reads headers only.
class HfFolder {
 public:
  /// Throws ConfigError with everything that is wrong: no weights or two kinds of them, a shard that isn't
  /// in the folder itself (or is a link out of it), a tensor that the index and the shards don't agree on, a
  /// tensor in two shards.
  explicit HfFolder(const std::filesystem::path& folder);

  const std::filesystem::path& path() const { return path_; }
  bool contains(std::string_view name) const { return files_.find(name) != files_.end(); }
  /// The file that holds a tensor. Throws Error where none does.
  const SafetensorsFile& file_of(std::string_view name) const;
  std::vector<std::string> names() const;
  /// All files, each once.
  const std::vector<SafetensorsFile>& files() const { return opened_; }

 private:
  std::filesystem::path path_;
  std::vector<SafetensorsFile> opened_;
  std::map<std::string, size_t, std::less<>> files_;  // by tensor, position in opened_
};

/// What keeps a folder from being the weights of `model`: missing and additional tensors, other shapes.
std::vector<std::string> tensor_differences(const HfFolder& folder, const HfModel& model);

struct HfWriteOptions {
  int64_t shard_bytes = 5'000'000'000;  ///< a file is at most this large, or holds a single tensor
  std::filesystem::path assets;         ///< tokenizer files are copied from here; empty: none
  bool in_place = false;                ///< the folder is there, and its maker's to rename or remove
};

/// A tensor of the folder to be written: one of HfModel::tensors, and its dtype there.
struct HfEntry {
  const HfTensor* tensor = nullptr;
  at::ScalarType dtype = at::kFloat;
};

int64_t num_bytes(const HfEntry& entry);

/// Hands the rows of entries[index], in Hugging Face's order, to `append`, piece by piece or at once. Called
/// once for each, in order.
using ProduceRows = std::function<void(size_t index, const AppendTensor& append)>;

/// Writes config.json, weights and tokenizer files. `entries`: element size downwards. Unless it is written
/// in place, the folder appears under its name complete, by one rename, or not at all, and one that was there
/// is kept as NAME.old (or NAME.old.2, ...). Throws Error.
void write_hf_folder(const std::filesystem::path& folder, const HfModel& model,
                     const std::vector<HfEntry>& entries, const HfWriteOptions& options,
                     const ProduceRows& produce);

}  // namespace titan
