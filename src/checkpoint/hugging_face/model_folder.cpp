#include "checkpoint/hugging_face/model_folder.h"

#include <unistd.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include <c10/util/accumulate.h>
#include <nlohmann/json.hpp>

#include "checkpoint/format/safetensors_writer.h"
#include "checkpoint/hugging_face/hf_json.h"
#include "core/durable.h"
#include "core/file.h"
#include "core/json.h"
#include "titan/checkpoint/storage.h"
#include "titan/core/error.h"
#include "titan/core/log.h"

namespace titan {
namespace detail {
namespace {

namespace fs = std::filesystem;
using checkpoint::WrittenFile;

constexpr const char* kTokenizerFiles[] = {
    "tokenizer.json",  "tokenizer_config.json",  "special_tokens_map.json", "added_tokens.json",
    "tokenizer.model", "generation_config.json", "chat_template.jinja",     "vocab.json",
    "merges.txt"};

fs::path without_slash(const fs::path& path) {
  const fs::path normal = fs::absolute(path).lexically_normal();
  return normal.has_filename() ? normal : normal.parent_path();
}

std::string index_text(const ModelFiles& files) {
  int64_t total = 0;
  std::map<std::string, std::string> weight_map;
  for (size_t i = 0; i < files.num_files(); ++i) {
    total += files.shards[i].bytes;
    for (const SafetensorsEntry& entry : files.in_file(i)) weight_map[entry.name] = files.name(i);
  }
  nlohmann::ordered_json index;
  index["metadata"]["total_size"] = total;
  index["weight_map"] = weight_map;
  return index.dump(2) + "\n";
}

const char* torch_name(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return "float64";
    case at::kFloat:
      return "float32";
    case at::kHalf:
      return "float16";
    case at::kBFloat16:
      return "bfloat16";
    default:
      TITAN_CHECK(false, "weights of ", dtype, " can't be written for Hugging Face");
  }
}

bool is_token_id(std::string_view key) { return key.ends_with("_token_id"); }

// 500000 equals 500000.0.
bool equal_values(const HfValue& a, const HfValue& b) {
  const auto number = [](const HfValue& value) {
    const auto* whole = std::get_if<int64_t>(&value);
    return whole ? HfValue(static_cast<double>(*whole)) : value;
  };
  return number(a) == number(b);
}

// Whether `source` says nothing else about the sizes of the model.
bool is_same_model(const HfConfig& source, const HfConfig& model) {
  for (const auto& [key, value] : model) {
    const bool is_null = std::holds_alternative<std::monostate>(value);
    const auto below = source.lower_bound(key + ".");
    if (is_null && !is_token_id(key) && below != source.end() && below->first.starts_with(key + "."))
      return false;
    const auto found = source.find(key);
    const bool differs = found != source.end() && !equal_values(found->second, value);
    if (differs && key != kLongestSequence && !is_token_id(key)) return false;
  }
  return true;
}

// Adds what options.config_source asks to keep. The keys of `replaced` are other names of the model's own.
void keep_values(nlohmann::json& config, const HfConfig& model, const fs::path& folder) {
  static const std::set<std::string> replaced = {"rope_parameters", "dtype"};
  std::error_code ignored;
  if (folder.empty() || !fs::exists(folder / "config.json", ignored)) return;
  try {
    if (!is_same_model(read_hf_config(folder), model)) return;
  } catch (const ConfigError& error) {
    // The weights are worth more than these values.
    return log::warning(str("the exported config.json has only the model's own values: ", error.what()));
  }
  const nlohmann::json source = parse_json(read_file(folder / "config.json"));
  for (const auto& [key, value] : source.items()) {
    const bool is_open = !config.contains(key) || (config[key].is_null() && is_token_id(key));
    if ((is_open || key == kLongestSequence) && !replaced.contains(key)) config[key] = value;
  }
}

std::string config_text(HfConfig config, at::ScalarType dtype, const fs::path& source) {
  config["torch_dtype"] = torch_name(dtype);
  nlohmann::json flat = nlohmann::json::object();
  for (const auto& [key, value] : config) {
    std::string pointer = "/" + key;
    std::replace(pointer.begin(), pointer.end(), '.', '/');
    flat[pointer] = json_of(value);
  }
  nlohmann::json whole = flat.unflatten();
  config.erase("torch_dtype");  // not a size
  keep_values(whole, config, source);
  return whole.dump(2) + "\n";
}

constexpr const char* kHfForm = "hugging_face";

// Each file is one "rank", which alone holds its tensors.
checkpoint::StateTable table_of(const ModelFiles& files) {
  const auto count = static_cast<int64_t>(files.num_files());
  std::vector<checkpoint::StateTensor> tensors;
  for (int64_t i = 0; i < count; ++i) {
    checkpoint::TensorLayout layout;
    if (count > 1) layout.axes.push_back({.name = "file", .size = count, .stride = 1, .dim = -1, .only = i});
    const auto shared = std::make_shared<const checkpoint::TensorLayout>(std::move(layout));
    for (const SafetensorsEntry& entry : files.in_file(static_cast<size_t>(i)))
      tensors.push_back({.name = entry.name, .dtype = entry.dtype, .shape = entry.shape, .layout = shared});
  }
  return {std::move(tensors), count};
}

checkpoint::Manifest manifest_of(const ModelFiles& files, const std::vector<WrittenFile>& written,
                                 const HfWriteOptions& options, std::map<std::string, std::string> digests) {
  checkpoint::Manifest manifest{.run_id = checkpoint::detail::random_id(),
                                .step = options.step,
                                .library = checkpoint::detail::library_text(),
                                .config = options.config,
                                .texts = std::move(digests),
                                .table = table_of(files),
                                .files = {}};
  manifest.texts[checkpoint::detail::kModelForm] = files.hf ? kHfForm : "titan";
  for (const WrittenFile& file : written) {
    manifest.files.push_back(file.record);
    manifest.finite = manifest.finite && file.finite;
  }
  return manifest;
}

}  // namespace

// ---- which tensors go into which file

std::string ModelFiles::name(size_t file) const {
  return checkpoint::detail::model_file_name(static_cast<int64_t>(file), static_cast<int64_t>(num_files()));
}

std::vector<SafetensorsEntry> ModelFiles::in_file(size_t file) const {
  const Shard& shard = shards.at(file);
  return {entries.begin() + static_cast<std::ptrdiff_t>(shard.begin),
          entries.begin() + static_cast<std::ptrdiff_t>(shard.end)};
}

// transformers refuses a file without it.
SafetensorsMetadata ModelFiles::metadata() const {
  return hf ? SafetensorsMetadata{{"format", "pt"}} : SafetensorsMetadata{};
}

std::vector<Shard> cut(const std::vector<SafetensorsEntry>& entries, int64_t shard_bytes) {
  std::vector<Shard> shards = {{}};
  for (size_t index = 0; index < entries.size(); ++index) {
    const int64_t bytes = num_bytes(entries[index]);
    if (shards.back().bytes > 0 && shards.back().bytes + bytes > shard_bytes)
      shards.push_back({index, index});
    shards.back().end = index + 1;
    shards.back().bytes += bytes;
  }
  return shards;
}

// Fewer files need larger limits, so the smallest limit is found by halving.
std::vector<Shard> cut_evenly(const std::vector<SafetensorsEntry>& entries, int64_t num_files) {
  int64_t low = 1, high = 1;
  for (const SafetensorsEntry& entry : entries) high += num_bytes(entry);
  while (low < high) {
    const int64_t limit = low + (high - low) / 2;
    if (static_cast<int64_t>(cut(entries, limit).size()) <= num_files)
      high = limit;
    else
      low = limit + 1;
  }
  return cut(entries, low);
}

bool has_hf_names(const fs::path& folder) {
  if (fs::exists(folder / checkpoint::kModelManifestName))
    return checkpoint::read_model_manifest(folder).texts.at(checkpoint::detail::kModelForm) == kHfForm;
  const std::vector<std::string> names = HfFolder(folder).names();
  return std::ranges::any_of(names, [](const std::string& name) { return name.starts_with("model."); });
}

std::vector<Box> pieces_of(const SafetensorsEntry& tensor, int64_t rotary_head_dim, int64_t piece_bytes) {
  const auto element_size = static_cast<int64_t>(c10::elementSize(tensor.dtype));
  if (rotary_head_dim == 0) return checkpoint::slabs_of(tensor.shape, element_size, piece_bytes);
  const int64_t rows = tensor.shape.at(0), num_heads = rows / rotary_head_dim;
  TITAN_CHECK(rows % rotary_head_dim == 0, "tensor '", tensor.name, "': its ", rows, " rows aren't heads of ",
              rotary_head_dim);
  std::vector<Box> pieces;
  for (const Box& heads :
       checkpoint::slabs_of({num_heads}, num_bytes(tensor) / std::max<int64_t>(1, num_heads), piece_bytes)) {
    Box piece{std::vector<int64_t>(tensor.shape.size(), 0), tensor.shape};
    piece.offset[0] = heads.offset[0] * rotary_head_dim;
    piece.length[0] = heads.length[0] * rotary_head_dim;
    pieces.push_back(std::move(piece));
  }
  return pieces;
}

// ---- the folder

NewFolder::NewFolder(const fs::path& path)
    : final_(without_slash(path)),
      temporary_(final_.parent_path() / str(".", final_.filename().string(), ".", ::getpid(), ".tmp")) {
  std::error_code ignored;
  fs::remove_all(temporary_, ignored);  // an earlier process with this number may have left it
  make_folder(temporary_);
}

NewFolder::~NewFolder() {
  std::error_code ignored;
  if (!committed_) fs::remove_all(temporary_, ignored);
}

void NewFolder::commit() {
  sync_folder(temporary_);
  if (is_there(final_)) rename_folder(final_, free_name());
  rename_folder(temporary_, final_);
  committed_ = true;
  sync_folder(final_.parent_path());
}

fs::path NewFolder::free_name() const {
  for (int number = 1;; ++number) {
    fs::path name = final_;
    name += number == 1 ? std::string(".old") : str(".old.", number);
    if (!is_there(name)) return name;
  }
}

void finish_model_folder(const fs::path& folder, const ModelFiles& files,
                         const std::vector<WrittenFile>& written, const HfWriteOptions& options) {
  std::map<std::string, std::string> digests;
  const auto write = [&](const std::string& name, const std::string& text) {
    write_file_atomic(folder / name, text);
    digests[name] = checkpoint::digest_of(text);
  };
  if (files.num_files() > 1) write(checkpoint::detail::kModelIndex, index_text(files));
  if (files.hf) {
    write("config.json", config_text(files.hf->config, files.entries.back().dtype, options.config_source));
    for (const char* name : kTokenizerFiles)
      if (!options.assets.empty() && fs::is_regular_file(options.assets / name))
        write(name, read_file(options.assets / name));
  }
  const checkpoint::Manifest manifest = manifest_of(files, written, options, std::move(digests));
  // Also notices a file system that the ranks don't share.
  const auto problems = checkpoint::quick_problems(folder, manifest);
  TITAN_CHECK(problems.empty(), problems.front());
  write_file_atomic(folder / checkpoint::kModelManifestName, to_text(manifest));
}

}  // namespace detail

// ---- one process

int64_t num_bytes(const HfEntry& entry) {
  return c10::multiply_integers(entry.tensor->shape) * static_cast<int64_t>(c10::elementSize(entry.dtype));
}

void write_hf_folder(const std::filesystem::path& folder, const HfModel& model,
                     const std::vector<HfEntry>& entries, const HfWriteOptions& options,
                     const ProduceParts& produce) {
  TITAN_CHECK(!entries.empty(), folder.string(), ": a model without parameters can't be saved");
  checkpoint::require_local(folder, "a Hugging Face folder");
  detail::ModelFiles files{.hf = &model, .entries = {}, .shards = {}};
  for (const HfEntry& entry : entries)
    files.entries.push_back({entry.tensor->hf_name, entry.dtype, entry.tensor->shape});
  files.shards = detail::cut(files.entries, options.shard_bytes);
  std::optional<detail::NewFolder> made;
  if (!options.in_place) made.emplace(folder);
  const std::filesystem::path& place = made ? made->path() : folder;
  std::vector<checkpoint::WrittenFile> written;
  for (size_t i = 0; i < files.num_files(); ++i)
    written.push_back(detail::write_checked(
        place / files.name(i), files.in_file(i), files.metadata(),
        [&](size_t index, const AppendTensor& append) { produce(files.shards[i].begin + index, append); }));
  detail::finish_model_folder(place, files, written, options);
  if (made) made->commit();
}

}  // namespace titan
