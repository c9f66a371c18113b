// Writing a Hugging Face folder.

#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include <c10/util/accumulate.h>
#include <nlohmann/json.hpp>

#include "core/durable.h"
#include "core/file.h"
#include "titan/checkpoint/hugging_face.h"
#include "titan/checkpoint/storage.h"
#include "titan/core/error.h"

namespace titan {
namespace {

namespace fs = std::filesystem;

constexpr const char* kTokenizerFiles[] = {"tokenizer.json",          "tokenizer_config.json",
                                           "special_tokens_map.json", "added_tokens.json",
                                           "tokenizer.model",         "generation_config.json"};

// A folder that appears whole or not at all, as write_file_atomic does for files. It is made under a
// temporary name, `.NAME.PID.tmp`, next to its own, and removed by the destructor unless commit() gave it its
// name.
class NewFolder {
 public:
  explicit NewFolder(const fs::path& path)
      : final_(without_slash(path)),
        temporary_(final_.parent_path() / str(".", final_.filename().string(), ".", ::getpid(), ".tmp")) {
    std::error_code ignored;
    fs::remove_all(temporary_, ignored);  // of an earlier process with this number
    make_folder(temporary_);
  }
  ~NewFolder() {
    std::error_code ignored;
    if (!committed_) fs::remove_all(temporary_, ignored);
  }
  NewFolder(const NewFolder&) = delete;
  NewFolder& operator=(const NewFolder&) = delete;

  const fs::path& path() const { return temporary_; }

  // Renames it, and syncs. A folder that has the name is kept as NAME.old, NAME.old.2, ...
  void commit() {
    detail::sync_folder(temporary_);
    if (detail::is_there(final_)) detail::rename_folder(final_, free_name());
    detail::rename_folder(temporary_, final_);
    committed_ = true;
    detail::sync_folder(final_.parent_path());
  }

 private:
  static fs::path without_slash(const fs::path& path) {
    const fs::path normal = fs::absolute(path).lexically_normal();
    return normal.has_filename() ? normal : normal.parent_path();
  }
  fs::path free_name() const {
    for (int number = 1;; ++number) {
      fs::path name = final_;
      name += number == 1 ? std::string(".old") : str(".old.", number);
      if (!detail::is_there(name)) return name;
    }
  }

  fs::path final_, temporary_;
  bool committed_ = false;
};

// entries[begin, end) go into one file.
struct Shard {
  size_t begin = 0, end = 0;
  int64_t bytes = 0;
};

std::vector<Shard> cut(const std::vector<HfEntry>& entries, int64_t shard_bytes) {
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

std::string shard_name(size_t index, size_t count) {
  if (count == 1) return "model.safetensors";
  char name[64];
  std::snprintf(name, sizeof name, "model-%05zu-of-%05zu.safetensors", index + 1, count);
  return name;
}

void write_shard(const fs::path& path, const std::vector<HfEntry>& entries, const Shard& shard,
                 const ProduceParts& produce) {
  std::vector<SafetensorsEntry> in_file;
  for (size_t index = shard.begin; index < shard.end; ++index)
    in_file.push_back({entries[index].tensor->hf_name, entries[index].dtype, entries[index].tensor->shape});
  // transformers refuses a file without this.
  write_safetensors_in_parts(
      path, in_file, {{"format", "pt"}},
      [&](size_t index, const AppendTensor& append) { produce(shard.begin + index, append); });
}

void write_index(const fs::path& path, const std::vector<HfEntry>& entries,
                 const std::vector<Shard>& shards) {
  int64_t total = 0;
  std::map<std::string, std::string> weight_map;
  for (size_t i = 0; i < shards.size(); ++i) {
    total += shards[i].bytes;
    for (size_t entry = shards[i].begin; entry < shards[i].end; ++entry)
      weight_map[entries[entry].tensor->hf_name] = shard_name(i, shards.size());
  }
  nlohmann::ordered_json index;
  index["metadata"]["total_size"] = total;
  index["weight_map"] = weight_map;
  write_file_atomic(path, index.dump(2) + "\n");
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

std::string config_text(HfConfig config, at::ScalarType dtype) {
  config["torch_dtype"] = torch_name(dtype);
  nlohmann::json flat = nlohmann::json::object();
  for (const auto& [key, value] : config) {
    std::string pointer = "/" + key;
    std::replace(pointer.begin(), pointer.end(), '.', '/');
    const auto set = [&](const auto& held) {
      if constexpr (std::is_same_v<decltype(held), const std::monostate&>) {
        flat[pointer] = nullptr;
      } else {
        flat[pointer] = held;
      }
    };
    std::visit(set, value);
  }
  return flat.unflatten().dump(2) + "\n";
}

void copy_tokenizer(const fs::path& from, const fs::path& to) {
  if (from.empty() || !fs::is_directory(from)) return;
  for (const char* name : kTokenizerFiles)
    if (fs::is_regular_file(from / name)) write_file_atomic(to / name, read_file(from / name));
}

void write_files(const fs::path& folder, const HfModel& model, const std::vector<HfEntry>& entries,
                 const HfWriteOptions& options, const ProduceParts& produce) {
  const std::vector<Shard> shards = cut(entries, options.shard_bytes);
  for (size_t i = 0; i < shards.size(); ++i)
    write_shard(folder / shard_name(i, shards.size()), entries, shards[i], produce);
  if (shards.size() > 1) write_index(folder / "model.safetensors.index.json", entries, shards);
  write_file_atomic(folder / "config.json", config_text(model.config, entries.back().dtype));
  copy_tokenizer(options.assets, folder);
}

}  // namespace

int64_t num_bytes(const HfEntry& entry) {
  return c10::multiply_integers(entry.tensor->shape) * static_cast<int64_t>(c10::elementSize(entry.dtype));
}

void write_hf_folder(const fs::path& folder, const HfModel& model, const std::vector<HfEntry>& entries,
                     const HfWriteOptions& options, const ProduceParts& produce) {
  TITAN_CHECK(!entries.empty(), folder.string(), ": a model without parameters can't be saved");
  checkpoint::require_local(folder, "a Hugging Face folder");
  if (options.in_place) return write_files(folder, model, entries, options, produce);
  NewFolder written(folder);
  write_files(written.path(), model, entries, options, produce);
  written.commit();
}

}  // namespace titan
