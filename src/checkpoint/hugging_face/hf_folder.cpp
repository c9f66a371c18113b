// A Hugging Face folder: its files and their checks, and the order of its rows.

#include "titan/checkpoint/hugging_face.h"

#include <algorithm>
#include <set>

#include <ATen/ops/empty.h>
#include <c10/util/StringUtil.h>
#include <c10/util/accumulate.h>
#include <nlohmann/json.hpp>

#include "checkpoint/format/rank_file.h"
#include "checkpoint/hugging_face/hf_json.h"
#include "core/file.h"
#include "core/json.h"
#include "titan/checkpoint/storage.h"
#include "titan/core/error.h"
#include "titan/core/log.h"

namespace titan {
namespace {

namespace fs = std::filesystem;

constexpr const char* kSingle = "model.safetensors";
constexpr const char* kIndex = checkpoint::detail::kModelIndex;

// Why `file` isn't a regular file in the folder; empty: it is one.
std::string problem_of_file(const fs::path& folder, const fs::path& file) {
  std::error_code error;
  const fs::path target = fs::canonical(file, error);
  if (error) return str(file.string(), ": ", error.message());
  if (!fs::is_regular_file(target, error)) return str(file.string(), ": not a regular file");
  if (target.parent_path() != fs::canonical(folder))
    return str(file.string(), ": is a link to ", target.string(),
               ", outside the folder; copy the folder with its links resolved (cp -rL)");
  return "";
}

// The differences from the folder's manifest, if it has one: sizes and headers of the weights, the index.
// Checksums in the headers are compared while weights are read.
std::vector<std::string> manifest_problems(const fs::path& folder, std::set<std::string> names) {
  using namespace checkpoint::detail;
  const fs::path path = folder / checkpoint::kModelManifestName;
  if (!fs::exists(path)) return {};
  std::vector<std::string> problems;
  const auto judge = [&](const auto& part) {
    try {
      part();
    } catch (const Error& error) {
      problems.push_back(error.what());
    }
  };
  judge([&] {
    const checkpoint::Manifest manifest = checkpoint::read_model_manifest(folder);
    for (size_t i = 0; i < manifest.files.size(); ++i) {
      const fs::path file = stored_file(folder, manifest, static_cast<int64_t>(i));
      names.erase(file.filename().string());
      judge([&] { checkpoint::RankFile(file, manifest.files[i]); });
    }
    const auto digest = manifest.texts.find(kIndex);
    const std::string index =
        digest == manifest.texts.end() ? "" : digest_problem(folder / kIndex, digest->second);
    if (!index.empty()) problems.push_back(str((folder / kIndex).string(), ": ", index));
    for (const std::string& name : names)
      problems.push_back(str((folder / name).string(), ": isn't in the manifest"));
  });
  if (!problems.empty())
    problems.push_back(str("if these files were changed on purpose, remove ", path.string()));
  return problems;
}

constexpr size_t kMaxConfigBytes = 1 << 20;
constexpr size_t kMaxIndexBytes = 100'000'000;

bool is_plain_name(const std::string& name) {
  return name.find_first_of(std::string_view("/\0", 2)) == std::string::npos && !name.starts_with('.') &&
         name.ends_with(".safetensors");
}

void check_heads(int64_t num_rows, int64_t head_dim) {
  TITAN_CHECK(head_dim % 2 == 0 && num_rows % head_dim == 0, num_rows, " rows aren't heads of ", head_dim,
              " rotated in pairs");
}

// Rows that a part of a head takes from the other order: `length` of them, `stride` apart.
struct RowRun {
  int64_t from = 0, from_stride = 1;
  int64_t to = 0, to_stride = 1;
  int64_t length = 0;
};

// One of the two runs of rows [begin, end) of a head: there is one for each half of the pairs.
RowRun run_of(int64_t half, int64_t head_dim, int64_t begin, int64_t end, RowOrder to) {
  const int64_t pairs = head_dim / 2;
  if (to == RowOrder::Ours) {
    const int64_t first = (begin - half + 1) / 2, last = (end - half + 1) / 2;
    return {
        .from = half * pairs + first, .to = 2 * first + half - begin, .to_stride = 2, .length = last - first};
  }
  const int64_t first = std::clamp<int64_t>(begin - half * pairs, 0, pairs);
  const int64_t last = std::clamp<int64_t>(end - half * pairs, 0, pairs);
  return {
      .from = 2 * first + half, .from_stride = 2, .to = half * pairs + first - begin, .length = last - first};
}

int64_t span(int64_t length, int64_t stride) { return (length - 1) * stride + 1; }

}  // namespace

// ---- config.json

HfConfig read_hf_config(const fs::path& folder) {
  const fs::path path = folder / "config.json";
  if (!fs::exists(path)) throw ConfigError(str("there is no ", path.string()));
  const std::string problem = problem_of_file(folder, path);
  if (!problem.empty()) throw ConfigError(problem);
  return detail::parse_hf_config(MappedFile(path).text(), path.string());
}

std::vector<std::string> differing_keys(const HfConfig& a, const HfConfig& b) {
  std::set<std::string> keys;
  for (const HfConfig* config : {&a, &b})
    for (const auto& [key, value] : *config) keys.insert(key);
  keys.erase(detail::kLongestSequence);
  std::vector<std::string> differing;
  for (const std::string& key : keys)
    if (value_text(a, key) != value_text(b, key)) differing.push_back(key);
  return differing;
}

// ---- shards

HfFolder::HfFolder(const fs::path& folder) : path_(folder) {
  const bool single = fs::exists(folder / kSingle), indexed = fs::exists(folder / kIndex);
  if (single == indexed)
    throw ConfigError(str(folder.string(), single ? ": holds both " : ": holds neither ", kSingle,
                          single ? " and " : " nor ", kIndex, single ? "; remove one of them" : ""));
  std::map<std::string, std::string> index;
  if (indexed) {
    const std::string problem = problem_of_file(folder, folder / kIndex);
    if (!problem.empty()) throw ConfigError(problem);
    index = detail::parse_hf_index(MappedFile(folder / kIndex).text(), (folder / kIndex).string());
  }
  std::set<std::string> names;
  if (single) names.insert(kSingle);
  for (const auto& [tensor, file] : index) names.insert(file);
  std::vector<std::string> problems;
  for (const std::string& name : names)
    if (std::string problem = problem_of_file(folder, folder / name); !problem.empty())
      problems.push_back(std::move(problem));
  if (problems.empty()) problems = manifest_problems(folder, names);
  if (!problems.empty()) throw ConfigError(std::move(problems));
  for (const std::string& name : names) {
    const SafetensorsFile& file = opened_.emplace_back(folder / name);
    for (const std::string& tensor : file.names()) {
      const auto listed = index.find(tensor);
      if (indexed && listed == index.end())
        problems.push_back(str(file.path().string(), ": '", tensor, "' is not in the index"));
      if (listed != index.end() && listed->second != name)
        problems.push_back(
            str(file.path().string(), ": the index says that '", tensor, "' is in ", listed->second));
      if (!files_.emplace(tensor, opened_.size() - 1).second)
        problems.push_back(str(file.path().string(), ": '", tensor, "' is in another file too"));
    }
  }
  for (const auto& [tensor, file] : index)
    if (!contains(tensor))
      problems.push_back(
          str((folder / file).string(), ": '", tensor, "' is missing, although the index lists it"));
  if (!problems.empty()) throw ConfigError(std::move(problems));
}

const SafetensorsFile& HfFolder::file_of(std::string_view name) const {
  const auto found = files_.find(name);
  TITAN_CHECK(found != files_.end(), path_.string(), ": no tensor '", name, "'");
  return opened_[found->second];
}

std::vector<std::string> HfFolder::names() const {
  std::vector<std::string> names;
  for (const auto& [name, file] : files_) names.push_back(name);
  return names;
}

std::vector<std::string> tensor_differences(const HfFolder& folder, const HfModel& model) {
  std::vector<std::string> problems;
  std::set<std::string> expected(model.ignored.begin(), model.ignored.end());
  for (const HfTensor& tensor : model.tensors) {
    expected.insert(tensor.hf_name);
    if (!folder.contains(tensor.hf_name)) {
      problems.push_back(titan::str(folder.path().string(), ": '", tensor.hf_name, "' is missing"));
      continue;
    }
    const SafetensorsFile& file = folder.file_of(tensor.hf_name);
    const SafetensorsInfo& info = file.info(tensor.hf_name);
    if (info.shape != tensor.shape)
      problems.push_back(titan::str(file.path().string(), ": '", tensor.hf_name, "' has shape ",
                                    at::IntArrayRef(info.shape), ", the model's has ",
                                    at::IntArrayRef(tensor.shape)));
    if (!at::isFloatingType(info.dtype) || c10::elementSize(info.dtype) < 2)
      problems.push_back(titan::str(file.path().string(), ": '", tensor.hf_name, "' has dtype ", info.dtype,
                                    "; allowed: float64, float32, float16, bfloat16"));
  }
  for (const std::string& name : folder.names())
    if (!expected.count(name))
      problems.push_back(
          titan::str(folder.file_of(name).path().string(), ": '", name, "' isn't part of the model"));
  return problems;
}

// ---- rows

at::Tensor reorder_rows(const at::Tensor& rows, int64_t rotary_head_dim, RowOrder to) {
  if (rotary_head_dim == 0) return rows;
  at::Tensor reordered = at::empty(rows.sizes(), rows.options());
  reorder_rows(rows, rotary_head_dim, to, reordered);
  return reordered;
}

void reorder_rows(const at::Tensor& rows, int64_t rotary_head_dim, RowOrder to, const at::Tensor& target) {
  TITAN_CHECK(target.is_contiguous() && target.sizes() == rows.sizes(), "rows ", rows.sizes(),
              " are reordered into a contiguous tensor of their shape, given ", target.sizes());
  if (rotary_head_dim == 0) {
    target.copy_(rows);
    return;
  }
  check_heads(rows.size(0), rotary_head_dim);
  const int64_t pairs = rotary_head_dim / 2;
  std::vector<int64_t> from = {rows.size(0) / rotary_head_dim, pairs, 2};
  if (to == RowOrder::Ours) std::swap(from[1], from[2]);
  const auto rest = rows.sizes().slice(1);
  from.insert(from.end(), rest.begin(), rest.end());
  const at::Tensor in_order = rows.reshape(from).transpose(1, 2);
  target.view(in_order.sizes()).copy_(in_order);
}

at::Tensor read_reordered(const SafetensorsFile& file, const std::string& name, const Box& box,
                          int64_t rotary_head_dim, RowOrder to) {
  if (rotary_head_dim == 0 || box.numel() == 0) return file.read_slice(name, box);
  check_heads(file.info(name).shape.at(0), rotary_head_dim);
  const int64_t first = box.offset[0], last = first + box.length[0];
  at::Tensor part = at::empty(box.length, at::dtype(file.info(name).dtype));
  for (int64_t head = first / rotary_head_dim * rotary_head_dim; head < last; head += rotary_head_dim) {
    const int64_t begin = std::max(first - head, int64_t{0});
    const int64_t end = std::min(last - head, rotary_head_dim);
    for (int64_t half = 0; half < 2; ++half) {
      const RowRun run = run_of(half, rotary_head_dim, begin, end, to);
      if (run.length <= 0) continue;
      Box source = box;
      source.offset[0] = head + run.from;
      source.length[0] = span(run.length, run.from_stride);
      const int64_t target = head + begin - first + run.to;
      part.slice(0, target, target + span(run.length, run.to_stride), run.to_stride)
          .copy_(file.read_slice(name, source).slice(0, 0, source.length[0], run.from_stride));
    }
  }
  return part;
}

// ---- the JSON files

nlohmann::json detail::json_of(const HfValue& value) {
  const auto convert = [](const auto& held) -> nlohmann::json {
    if constexpr (std::is_same_v<decltype(held), const std::monostate&>)
      return nullptr;
    else
      return held;
  };
  return std::visit(convert, value);
}

std::string value_text(const HfConfig& config, const std::string& key) {
  const auto found = config.find(key);
  return found == config.end() ? "unset" : to_text(found->second);
}

std::string to_text(const HfValue& value) {
  return detail::json_of(value).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

HfConfig detail::parse_hf_config(std::string_view text, const std::string& file) {
  HfConfig config;
  for (const auto& [keys, value] : read_json_leaves(text, kMaxConfigBytes, file)) {
    // {"a.b": 1} and {"a": {"b": 1}} would have the same key.
    const std::string key = c10::Join(".", keys);
    if (!config.emplace(key, value).second) throw ConfigError(str(file, ": '", key, "' occurs twice"));
  }
  return config;
}

std::map<std::string, std::string> detail::parse_hf_index(std::string_view text, const std::string& file) {
  std::map<std::string, std::string> map;
  std::vector<std::string> problems;
  for (const auto& [keys, value] : read_json_leaves(text, kMaxIndexBytes, file)) {
    if (keys[0] != "weight_map") continue;
    const auto* shard = std::get_if<std::string>(&value);
    if (keys.size() == 2 && shard && is_plain_name(*shard)) {
      map.emplace(keys[1], *shard);
    } else {
      problems.push_back(str(file, ": weight_map: '", keys.size() > 1 ? keys[1] : "", "' is in ",
                             to_text(value), "; allowed: the name of a .safetensors file in the folder"));
    }
  }
  if (problems.empty() && map.empty()) problems.push_back(str(file, ": weight_map names no tensors"));
  if (!problems.empty()) throw ConfigError(std::move(problems));
  return map;
}

}  // namespace titan
