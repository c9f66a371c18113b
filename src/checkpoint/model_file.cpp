#include "titan/checkpoint/model_file.h"

#include <set>

#include <ATen/core/grad_mode.h>

#include "gathered_model.h"
#include "titan/checkpoint/safetensors.h"
#include "titan/core/error.h"
#include "titan/tensor/param_storage.h"

namespace titan {
namespace {

// Everything that keeps `file` from being the weights of `parameters` and those of other ranks, one a line.
std::vector<std::string> differences(const std::vector<Parameter>& parameters,
                                     const std::set<std::string>& elsewhere, const SafetensorsFile& file) {
  std::vector<std::string> problems;
  std::set<std::string> expected = elsewhere;
  std::string path = file.path().string();
  for (const auto& parameter : parameters) {
    expected.insert(parameter.name);
    if (!file.contains(parameter.name)) {
      problems.push_back(titan::str(path, ": parameter '", parameter.name, "' is missing"));
    } else if (const auto& shape = file.info(parameter.name).shape; shape != parameter.data.global_shape) {
      problems.push_back(titan::str(path, ": '", parameter.name, "' has shape ", at::IntArrayRef(shape),
                                    ", the model's has ", at::IntArrayRef(parameter.data.global_shape)));
    }
  }
  for (const auto& name : file.names()) {
    if (!expected.count(name))
      problems.push_back(titan::str(path, ": '", name, "' is not a parameter of the model"));
  }
  return problems;
}

}  // namespace

void load_model(const std::vector<Parameter>& parameters, const std::filesystem::path& path,
                const DeviceMesh& pipeline) {
  const std::set<std::string> elsewhere = detail::names_of_pipeline(parameters, pipeline);
  SafetensorsFile file(path);
  auto problems = differences(parameters, elsewhere, file);
  if (!problems.empty()) throw ConfigError(std::move(problems));
  at::NoGradGuard no_grad;
  for (const auto& parameter : parameters) {
    at::Tensor local = parameter.data.local;
    TITAN_CHECK(!is_deferred(local), "parameter '", parameter.name,
                "' has no memory yet: materialize() the model first");
    local.copy_(file.read_slice(parameter.name, parameter.data.box));
  }
}

void save_model(const std::vector<Parameter>& parameters, const std::filesystem::path& path,
                std::optional<at::ScalarType> export_dtype, const DeviceMesh& pipeline) {
  detail::write_gathered(parameters, path, export_dtype, pipeline, [&](detail::GatheredModel& model) {
    write_safetensors(path, model.entries(), {}, [&](size_t index) { return model.gather(index); });
  });
}

}  // namespace titan
