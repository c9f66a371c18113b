#include "titan/checkpoint/hf_folder.h"

#include <set>

#include "hf_json.h"
#include "titan/core/error.h"
#include "titan/core/file.h"

namespace titan {
namespace {

namespace fs = std::filesystem;

constexpr const char* kSingle = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";

// "" where `file` is a regular file in the folder.
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

std::set<std::string> weight_files(const std::map<std::string, std::string>& index) {
  if (index.empty()) return {kSingle};
  std::set<std::string> files;
  for (const auto& [tensor, file] : index) files.insert(file);
  return files;
}

}  // namespace

HfConfig read_hf_config(const fs::path& folder) {
  const fs::path path = folder / "config.json";
  if (!fs::exists(path)) throw ConfigError(str("there is no ", path.string()));
  const std::string problem = problem_of_file(folder, path);
  if (!problem.empty()) throw ConfigError(problem);
  return detail::parse_hf_config(MappedFile(path).text(), path.string());
}

std::vector<std::string> config_differences(const HfModel& found, const HfModel& configured,
                                            const fs::path& folder) {
  std::set<std::string> keys;
  for (const HfModel* model : {&found, &configured})
    for (const auto& [key, value] : model->config) keys.insert(key);
  keys.erase("max_position_embeddings");
  std::vector<std::string> problems;
  const auto text = [](const HfModel& model, const std::string& key) {
    const auto entry = model.config.find(key);
    return entry == model.config.end() ? "unset" : to_text(entry->second);
  };
  for (const std::string& key : keys) {
    const std::string theirs = text(found, key), ours = text(configured, key);
    if (theirs != ours)
      problems.push_back(str((folder / "config.json").string(), ": ", key, " is ", theirs,
                             ", the configured model's is ", ours));
  }
  return problems;
}

HfFolder::HfFolder(const fs::path& folder) : path_(folder) {
  const bool single = fs::exists(folder / kSingle), indexed = fs::exists(folder / kIndex);
  if (single == indexed)
    throw ConfigError(str(folder.string(), single ? ": holds both " : ": holds neither ", kSingle,
                          single ? " and " : " nor ", kIndex, single ? "; which is meant?" : ""));
  std::map<std::string, std::string> index;
  if (indexed) {
    const std::string problem = problem_of_file(folder, folder / kIndex);
    if (!problem.empty()) throw ConfigError(problem);
    index = detail::parse_hf_index(MappedFile(folder / kIndex).text(), (folder / kIndex).string());
  }
  const std::set<std::string> names = weight_files(index);
  std::vector<std::string> problems;
  for (const std::string& name : names)
    if (std::string problem = problem_of_file(folder, folder / name); !problem.empty())
      problems.push_back(std::move(problem));
  if (!problems.empty()) throw ConfigError(std::move(problems));

  for (const std::string& name : names) {
    const SafetensorsFile& file = opened_.emplace_back(folder / name);
    for (const std::string& tensor : file.names()) {
      const auto listed = index.find(tensor);
      if (indexed && listed == index.end())
        problems.push_back(str(file.path().string(), ": '", tensor, "' is not in the index"));
      if (listed != index.end() && listed->second != name)
        problems.push_back(
            str(file.path().string(), ": '", tensor, "' is in ", listed->second, " by the index"));
      if (!files_.emplace(tensor, opened_.size() - 1).second)
        problems.push_back(str(file.path().string(), ": '", tensor, "' is in another file too"));
    }
  }
  for (const auto& [tensor, file] : index)
    if (!contains(tensor))
      problems.push_back(str((folder / file).string(), ": '", tensor, "' is missing, the index lists it"));
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
      problems.push_back(titan::str(file.path().string(), ": '", tensor.hf_name, "' is of ", info.dtype,
                                    "; allowed: float64, float32, float16, bfloat16"));
  }
  for (const std::string& name : folder.names())
    if (!expected.count(name))
      problems.push_back(
          titan::str(folder.file_of(name).path().string(), ": '", name, "' isn't part of the model"));
  return problems;
}

}  // namespace titan
