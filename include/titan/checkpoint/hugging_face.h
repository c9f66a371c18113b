#pragma once

// A model under the names and in the layout of Hugging Face's transformers: a folder with config.json, and
// either model.safetensors or shards with model.safetensors.index.json. A model family describes itself by an
// HfModel, which determines how folders are read and written. A folder may come from anyone, so the index is
// checked against the shards' own headers before it is used.
//
//   load_hf_model(parameters, model, "Llama-3.1-8B");          // each rank reads its own rows
//   save_model(parameters, world, "exported", {.hf = &model});  // every rank calls it
//   convert_to_hf("model.safetensors", "exported", model);     // without a job
//
// [Note: rows of rotary pairs]
// We rotate neighboring rows of a head, (2i, 2i + 1); transformers rotates rows half a head apart,
// (i, i + head_dim / 2). So in every head of wq and wk (head_dim rows h * head_dim + ...)
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
#include "titan/checkpoint/step_folder.h"
#include "titan/dist/world.h"
#include "titan/parallel/parameters.h"

namespace titan {

// ---- a model in Hugging Face's terms

/// A value of config.json; monostate is null.
using HfValue = std::variant<std::monostate, bool, int64_t, double, std::string>;
/// config.json by dotted path; array elements by position: "rope_scaling.factor", "architectures.0".
using HfConfig = std::map<std::string, HfValue>;

/// As in config.json: "llama", 64, 1e-05, null.
std::string to_text(const HfValue& value);
/// The value of a key, or "unset".
std::string value_text(const HfConfig& config, const std::string& key);

struct HfTensor {
  std::string name;     ///< ours
  std::string hf_name;  ///< theirs
  std::vector<int64_t> shape;
  int64_t rotary_head_dim = 0;  ///< rows per head in the order above; 0: the rows are in the same order
};

/// A model of given sizes.
struct HfModel {
  HfConfig config;                ///< its config.json
  std::vector<HfTensor> tensors;  ///< the whole model's, each once (a tied matrix under its first name)
  /// Tensors that a folder may also hold: tables that older versions saved.
  std::vector<std::string> ignored = {};
};

enum class RowOrder { Ours, HuggingFace };

/// The whole tensor converted to the order `to` from the other one: a new tensor, or `rows` itself where
/// rotary_head_dim is 0.
at::Tensor reorder_rows(const at::Tensor& rows, int64_t rotary_head_dim, RowOrder to);
/// The same into `target`: contiguous, of the shape of `rows`, not overlapping it, of any dtype.
void reorder_rows(const at::Tensor& rows, int64_t rotary_head_dim, RowOrder to, const at::Tensor& target);

/// Reads the part `box`, in terms of the order `to`, of the tensor `name`, which `file` holds in the other
/// order. Touches the rows of that part, and at most as many rows between them.
at::Tensor read_reordered(const SafetensorsFile& file, const std::string& name, const Box& box,
                          int64_t rotary_head_dim, RowOrder to);

// ---- folders

/// Reads a folder's config.json. Throws ConfigError that names the file and the problem.
HfConfig read_hf_config(const std::filesystem::path& folder);

/// The keys whose values differ between two configs, or that only one of them has. The longest sequence isn't
/// compared, because training chooses it.
std::vector<std::string> differing_keys(const HfConfig& a, const HfConfig& b);

/// The weights of a folder, under any names, memory-mapped: opening reads headers only.
class HfFolder {
 public:
  /// Throws ConfigError that lists all problems: no weights or two kinds of them, a shard outside the folder
  /// (or a link out of it), a tensor on which the index and the shards disagree, a tensor in two shards, a
  /// file that isn't as the folder's manifest says, if there is one.
  explicit HfFolder(const std::filesystem::path& folder);

  const std::filesystem::path& path() const { return path_; }
  bool contains(std::string_view name) const { return files_.find(name) != files_.end(); }
  /// The file that holds a tensor. Throws Error if there is none.
  const SafetensorsFile& file_of(std::string_view name) const;
  std::vector<std::string> names() const;
  /// All files, each once.
  const std::vector<SafetensorsFile>& files() const { return opened_; }

 private:
  std::filesystem::path path_;
  std::vector<SafetensorsFile> opened_;
  std::map<std::string, size_t, std::less<>> files_;  // tensor to position in opened_
};

/// Why a folder doesn't hold the weights of `model`: missing and unexpected tensors, wrong shapes.
std::vector<std::string> tensor_differences(const HfFolder& folder, const HfModel& model);

struct HfWriteOptions {
  int64_t shard_bytes = 5'000'000'000;  ///< a file is at most this large, or holds a single tensor
  std::filesystem::path assets = {};    ///< tokenizer files are copied from here; empty: none
  /// A folder with this model's config.json: keeps its values that HfModel doesn't set, its ids of special
  /// tokens and its longest sequence. Ignored if it has none, or another model's; empty: none.
  std::filesystem::path config_source = {};
  bool in_place = false;    ///< the folder exists, and the caller renames or removes it
  std::string config = {};  ///< for the manifest: the run's settings as TOML; may be empty
  int64_t step = 0;         ///< for the manifest
};

/// A tensor to be written: one of HfModel::tensors, and its dtype in the folder.
struct HfEntry {
  const HfTensor* tensor = nullptr;
  at::ScalarType dtype = at::kFloat;
};
int64_t num_bytes(const HfEntry& entry);

/// Writes config.json, weights, tokenizer files, and a manifest (kModelManifestName). `entries` are sorted by
/// element size, largest first. `produce` appends the rows of entries[index], in Hugging Face's order. Unless
/// in_place, the folder appears under its name complete, by one rename, or not at all, and an existing folder
/// of that name is kept as NAME.old (or NAME.old.2, ...). Throws Error.
void write_hf_folder(const std::filesystem::path& folder, const HfModel& model,
                     const std::vector<HfEntry>& entries, const HfWriteOptions& options,
                     const ProduceParts& produce);

// ---- a job's model

/// Copies this rank's part of every parameter out of the folder (each rank reads only its own rows),
/// converted to the parameter's dtype; config.json isn't read. Throws ConfigError that lists all missing and
/// unexpected tensors and wrong shapes before any parameter has changed. `parameters` may be one stage of
/// `model`, and must be materialized.
void load_hf_model(const std::vector<Parameter>& parameters, const HfModel& model,
                   const std::filesystem::path& folder);

struct ModelSaveOptions {
  HfWriteOptions folder = {};
  std::optional<at::ScalarType> export_dtype = std::nullopt;  ///< unset: each tensor keeps its own
  DeviceMesh pipeline = {};                                   ///< the axis of the stages, if there are any
  const HfModel* hf = nullptr;                                ///< unset: our names, without config.json
  int64_t least_file_bytes = 128'000'000;  ///< ranks share the writing if each gets a file of this size
};

/// Writes all parameters into a folder that all ranks see, and throws the same Error on all ranks if that
/// fails. Collective over the world. Each rank writes its share of the files, with checksums, at most
/// 16 MiB at a time: it takes the parts of its tensors from the ranks that hold them. If there is more than
/// one file, the folder has an index in Hugging Face's form. A name that several stages have (a tied matrix)
/// is written once. Unless in_place, the folder appears as write_hf_folder's.
void save_model(const std::vector<Parameter>& parameters, const dist::World& world,
                const std::filesystem::path& folder, const ModelSaveOptions& options = {});

// ---- converting without a job. Reads and writes 16 MiB at a time, so that memory doesn't depend on the
// model's size. Throws ConfigError where the source isn't `model`'s weights.

struct ConvertOptions {
  std::optional<at::ScalarType> dtype;  ///< unset: each tensor keeps its own
  HfWriteOptions folder;                ///< used only when writing a folder
  std::function<void(int64_t bytes, int64_t total)> progress = [](int64_t, int64_t) {};  ///< bytes written
};

/// Writes a folder's weights as one file with our names.
void convert_from_hf(const std::filesystem::path& folder, const std::filesystem::path& file,
                     const HfModel& model, const ConvertOptions& options = {});
/// Writes one file, or a folder that save_model wrote with our names, as a folder.
void convert_to_hf(const std::filesystem::path& file, const std::filesystem::path& folder,
                   const HfModel& model, const ConvertOptions& options = {});
/// Writes the model of a saved state (its tensors "model.NAME", each under NAME) as one file, whatever ranks
/// saved it: the same bytes as save_model's, if that writes one file.
void convert_state(const checkpoint::SavedState& state, const std::filesystem::path& file,
                   const ConvertOptions& options = {});
/// The same as a folder.
void convert_state_to_hf(const checkpoint::SavedState& state, const std::filesystem::path& folder,
                         const HfModel& model, const ConvertOptions& options = {});

}  // namespace titan
