// A job's model alone, read into the shards of any mesh: files with our names, or a Hugging Face folder.

#include <map>
#include <set>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include "checkpoint/save/rank_tree.h"
#include "tensor/memory.h"
#include "titan/checkpoint/hugging_face.h"
#include "titan/checkpoint/safetensors.h"
#include "titan/core/error.h"

namespace titan {
namespace {

constexpr dist::Label kLabel{.phase = "checkpoint::load_model"};

// ---- comparing names

void check_materialized(const Parameter& parameter) {
  TITAN_CHECK(!is_deferred(parameter.data.local), "parameter '", parameter.name,
              "' has no memory yet: materialize() the model first");
}

// The files of a folder, or one file.
std::vector<SafetensorsFile> open_files(const std::filesystem::path& path) {
  if (std::filesystem::is_directory(path)) return HfFolder(path).files();
  return {SafetensorsFile(path)};
}

using FileOfTensor = std::map<std::string, SafetensorsFile>;

// Why the files in `path` don't hold the weights of `parameters` and of the other stages, whose names are
// among `expected`, a line each.
std::vector<std::string> differences(const std::vector<Parameter>& parameters,
                                     const std::set<std::string>& expected, const FileOfTensor& files,
                                     const std::string& path) {
  std::vector<std::string> problems;
  for (const auto& parameter : parameters) {
    const auto file = files.find(parameter.name);
    if (file == files.end()) {
      problems.push_back(titan::str(path, ": parameter '", parameter.name, "' is missing"));
    } else if (const auto& shape = file->second.info(parameter.name).shape;
               shape != parameter.data.global_shape) {
      problems.push_back(titan::str(path, ": '", parameter.name, "' has shape ", at::IntArrayRef(shape),
                                    ", the model's has ", at::IntArrayRef(parameter.data.global_shape)));
    }
  }
  for (const auto& [name, file] : files) {
    if (!expected.count(name))
      problems.push_back(titan::str(path, ": '", name, "' is not a parameter of the model"));
  }
  return problems;
}

// `path`: one file, or a folder of a model alone.
FileOfTensor files_by_tensor(const std::filesystem::path& path) {
  FileOfTensor files;
  for (const SafetensorsFile& file : open_files(path))
    for (const std::string& name : file.names()) files.emplace(name, file);
  return files;
}

using ByName = std::map<std::string, const HfTensor*, std::less<>>;

ByName by_name(const HfModel& model) {
  ByName tensors;
  for (const HfTensor& tensor : model.tensors) tensors.emplace(tensor.name, &tensor);
  return tensors;
}

const HfTensor& tensor_of(const ByName& tensors, const std::string& name, const std::vector<int64_t>& shape) {
  const auto found = tensors.find(name);
  TITAN_CHECK(found != tensors.end(), "parameter '", name,
              "' has no name in Hugging Face's form of the model");
  TITAN_CHECK(found->second->shape == shape, "parameter '", name, "' has shape ", at::IntArrayRef(shape),
              ", in Hugging Face's form of the model ", at::IntArrayRef(found->second->shape));
  return *found->second;
}

}  // namespace

std::vector<std::string> model_file_differences(const std::vector<Parameter>& parameters,
                                                const std::filesystem::path& path) {
  std::set<std::string> names;
  for (const Parameter& parameter : parameters) names.insert(parameter.name);
  return differences(parameters, names, files_by_tensor(path), path.string());
}

void load_model(const std::vector<Parameter>& parameters, const std::filesystem::path& path,
                const DeviceMesh& pipeline) {
  std::vector<std::string> own;
  for (const Parameter& parameter : parameters) own.push_back(parameter.name);
  const auto expected = checkpoint::detail::names_of_stages(own, pipeline, kLabel);
  const FileOfTensor files = files_by_tensor(path);
  auto problems = differences(parameters, expected, files, path.string());
  if (!problems.empty()) throw ConfigError(std::move(problems));
  at::NoGradGuard no_grad;
  for (const auto& parameter : parameters) {
    check_materialized(parameter);
    at::Tensor local = parameter.data.local;
    local.copy_(files.at(parameter.name).read_slice(parameter.name, parameter.data.box));
  }
}

void load_hf_model(const std::vector<Parameter>& parameters, const HfModel& model,
                   const std::filesystem::path& folder) {
  const HfFolder files(folder);
  auto problems = tensor_differences(files, model);
  if (!problems.empty()) throw ConfigError(std::move(problems));
  const ByName tensors = by_name(model);
  for (const Parameter& parameter : parameters) {
    tensor_of(tensors, parameter.name, parameter.data.global_shape);
    check_materialized(parameter);
  }
  at::NoGradGuard no_grad;
  for (const Parameter& parameter : parameters) {
    const HfTensor& tensor = *tensors.at(parameter.name);
    at::Tensor local = parameter.data.local;
    local.copy_(read_reordered(files.file_of(tensor.hf_name), tensor.hf_name, parameter.data.box,
                               tensor.rotary_head_dim, RowOrder::Ours));
  }
}

}  // namespace titan
