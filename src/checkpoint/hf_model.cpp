#include "titan/checkpoint/hf_model.h"

#include <map>

#include <ATen/core/grad_mode.h>

#include "gathered_model.h"
#include "titan/core/error.h"
#include "titan/tensor/param_storage.h"

namespace titan {
namespace {

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

void load_hf_model(const std::vector<Parameter>& parameters, const HfModel& model,
                   const std::filesystem::path& folder) {
  const HfFolder files(folder);
  auto problems = tensor_differences(files, model);
  if (!problems.empty()) throw ConfigError(std::move(problems));
  const ByName tensors = by_name(model);
  for (const Parameter& parameter : parameters) {
    tensor_of(tensors, parameter.name, parameter.data.global_shape);
    TITAN_CHECK(!is_deferred(parameter.data.local), "parameter '", parameter.name,
                "' has no memory yet: materialize() the model first");
  }
  at::NoGradGuard no_grad;
  for (const Parameter& parameter : parameters) {
    const HfTensor& tensor = *tensors.at(parameter.name);
    at::Tensor local = parameter.data.local;
    local.copy_(read_reordered(files.file_of(tensor.hf_name), tensor.hf_name, parameter.data.box,
                               tensor.rotary_head_dim, RowOrder::Ours));
  }
}

void save_hf_model(const std::vector<Parameter>& parameters, const HfModel& model,
                   const std::filesystem::path& folder, const HfWriteOptions& options,
                   std::optional<at::ScalarType> export_dtype, const DeviceMesh& pipeline) {
  const ByName tensors = by_name(model);
  at::NoGradGuard no_grad;
  detail::write_gathered(parameters, folder, export_dtype, pipeline, [&](detail::GatheredModel& gathered) {
    std::vector<HfEntry> entries;
    for (const SafetensorsEntry& entry : gathered.entries())
      entries.push_back({&tensor_of(tensors, entry.name, entry.shape), entry.dtype});
    TITAN_CHECK(entries.size() == tensors.size(), folder.string(), ": the model has ", entries.size(),
                " parameters, Hugging Face's form of it ", tensors.size());
    write_hf_folder(folder, model, entries, options, [&](size_t index, const AppendTensor& append) {
      append(reorder_rows(gathered.gather(index), entries[index].tensor->rotary_head_dim,
                          RowOrder::HuggingFace));
    });
  });
}

}  // namespace titan
