#pragma once

// A model under the names and in the layout of Hugging Face's transformers. A family fills an HfModel in;
// hf_folder.h and hf_model.h read and write folders by it.
//
// [Note: rows of rotary pairs]
// We rotate neighbouring rows of a head, (2i, 2i + 1); transformers rotates rows half a head apart,
// (i, i + head_dim / 2). So of every head of wq and wk (head_dim rows h * head_dim + ...)
//
//   theirs[j * head_dim / 2 + i] = ours[2 i + j]        j = 0, 1; i = 0 ... head_dim / 2 - 1
//
// which is `permute` in transformers' models/llama/convert_llama_weights_to_hf.py, and TorchTitan's
// models/llama3/model/state_dict_adapter.py: w.view(heads, head_dim / 2, 2, dim).transpose(1, 2).

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include <ATen/core/Tensor.h>

#include "titan/checkpoint/safetensors.h"
#include "titan/checkpoint/saved_state.h"
#include "titan/parallel/parameters.h"

namespace titan {

/// A value of config.json; monostate is null.
using HfValue = std::variant<std::monostate, bool, int64_t, double, std::string>;
/// config.json by dotted path; an array's elements by position: "rope_scaling.factor", "architectures.0".
using HfConfig = std::map<std::string, HfValue>;

struct HfTensor {
  std::string name;     ///< ours
  std::string hf_name;  ///< theirs
  std::vector<int64_t> shape;
  int64_t rotary_head_dim = 0;  ///< heads of so many rows in the order above; 0: the same rows
};

/// A model of given sizes.
struct HfModel {
  HfConfig config;                ///< what config.json says of it
  std::vector<HfTensor> tensors;  ///< of the whole model, each once (a tied matrix under its first name)
  /// Tensors that a folder may hold besides: tables that older versions saved.
  std::vector<std::string> ignored = {};
};

enum class RowOrder { Ours, HuggingFace };

/// The whole tensor in the order `to`, from the other one: one new tensor, or `rows` itself where
/// rotary_head_dim is 0.
at::Tensor reorder_rows(const at::Tensor& rows, int64_t rotary_head_dim, RowOrder to);
/// As above, into `target`: contiguous, of the shape of `rows` and other memory, of any dtype.
void reorder_rows(const at::Tensor& rows, int64_t rotary_head_dim, RowOrder to, const at::Tensor& target);

/// The part `box`, counted in the order `to`, of a tensor that lies in `file` under `name` in the other
/// order; reads the rows of that part, and of what lies between them at most as much again.
at::Tensor read_reordered(const SafetensorsFile& file, const std::string& name, const Box& box,
                          int64_t rotary_head_dim, RowOrder to);

/// As in config.json: "llama", 64, 1e-05, null.
std::string to_text(const HfValue& value);

// A Hugging Face folder on disk: config.json, and either model.safetensors or shards with
// model.safetensors.index.json. It may come from a stranger: what the index says is checked against the
// shards' own headers before anything is read by it.

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

// A model's weights in and out of Hugging Face's form: into the shards of any mesh, out of them, and from
// file to file, or from a saved state, without a model.

/// Copies this rank's part of every parameter out of the folder (each rank reads only its own rows),
/// converting to the parameter's dtype; config.json isn't looked at. Throws ConfigError that lists all
/// missing and additional tensors and shape mismatches at once; then no parameter was changed. `parameters`
/// may be a stage of `model`, and must be materialized.
void load_hf_model(const std::vector<Parameter>& parameters, const HfModel& model,
                   const std::filesystem::path& folder);

/// Writes all parameters, cast to `export_dtype` (default: each its own), as a folder (write_hf_folder).
/// Collective as save_model, one tensor at a time. When it can't be written, every rank throws Error.
void save_hf_model(const std::vector<Parameter>& parameters, const HfModel& model,
                   const std::filesystem::path& folder, const HfWriteOptions& options,
                   std::optional<at::ScalarType> export_dtype = std::nullopt,
                   const DeviceMesh& pipeline = {});

struct ConvertOptions {
  std::optional<at::ScalarType> dtype;  ///< of all tensors; unset: each as it is
  HfWriteOptions folder;                ///< of the folder that is written
  std::function<void(int64_t bytes, int64_t total)> progress = [](int64_t, int64_t) {};  ///< written so far
};

// They read and write 16 MiB at a time, so that memory doesn't depend on the model's size, and throw
// ConfigError where the source isn't `model`'s weights.

/// A folder's weights as one file with our names.
void convert_from_hf(const std::filesystem::path& folder, const std::filesystem::path& file,
                     const HfModel& model, const ConvertOptions& options = {});
/// The one file as a folder.
void convert_to_hf(const std::filesystem::path& file, const std::filesystem::path& folder,
                   const HfModel& model, const ConvertOptions& options = {});
/// The model of a saved state, whatever ranks saved it (its tensors "model.NAME", each under NAME), as one
/// file: the bytes that save_model writes of it.
void convert_state(const checkpoint::SavedState& state, const std::filesystem::path& file,
                   const ConvertOptions& options = {});
/// The same as a folder.
void convert_state_to_hf(const checkpoint::SavedState& state, const std::filesystem::path& folder,
                         const HfModel& model, const ConvertOptions& options = {});

}  // namespace titan
