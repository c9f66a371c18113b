#include "titan/checkpoint/model_file.h"

#include <algorithm>
#include <set>

#include <ATen/core/grad_mode.h>

#include "titan/checkpoint/safetensors.h"
#include "titan/core/error.h"
#include "titan/tensor/param_storage.h"

namespace titan {
namespace {

constexpr dist::Label kLabel{.phase = "checkpoint::save_model"};

// Everything that keeps `file` from being the weights of `parameters`, one a line.
std::vector<std::string> differences(const std::vector<Parameter>& parameters, const SafetensorsFile& file) {
  std::vector<std::string> problems;
  std::set<std::string> expected;
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

const DeviceMesh& largest_mesh(const std::vector<Parameter>& parameters) {
  auto size = [](const Parameter& parameter) { return parameter.data.mesh.size(); };
  return std::max_element(parameters.begin(), parameters.end(),
                          [&](const Parameter& a, const Parameter& b) { return size(a) < size(b); })
      ->data.mesh;
}

// True on all ranks of the mesh where it is on one: the maximum along each axis in turn.
bool any_rank(const DeviceMesh& mesh, bool value) {
  double flag = value;
  for (const auto& axis : mesh.axes()) {
    if (axis.size > 1) flag = mesh.group(axis.name)->max(flag, kLabel);
  }
  return flag > 0;
}

// The tensors of the file in its order, each gathered from all ranks when it is asked for.
class GatheredModel {
 public:
  GatheredModel(const std::vector<Parameter>& parameters, std::optional<at::ScalarType> export_dtype) {
    for (const auto& parameter : parameters) {
      parameters_.emplace(parameter.name, &parameter);
      at::ScalarType dtype = export_dtype.value_or(parameter.data.local.scalar_type());
      entries_.push_back({parameter.name, dtype, parameter.data.global_shape});
    }
    TITAN_CHECK(parameters_.size() == parameters.size(), "two parameters have the same name");
    sort_for_file(entries_);
  }

  const std::vector<SafetensorsEntry>& entries() const { return entries_; }

  at::Tensor gather(size_t index) {
    next_ = index + 1;
    return full_tensor(parameters_.at(entries_[index].name)->data).to(entries_[index].dtype);
  }

  /// The gathers that are left: the other ranks wait in them.
  void finish() {
    while (next_ < entries_.size()) gather(next_);
  }

 private:
  std::map<std::string, const Parameter*> parameters_;
  std::vector<SafetensorsEntry> entries_;
  size_t next_ = 0;
};

}  // namespace

void load_model(const std::vector<Parameter>& parameters, const std::filesystem::path& path) {
  SafetensorsFile file(path);
  auto problems = differences(parameters, file);
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
                std::optional<at::ScalarType> export_dtype) {
  TITAN_CHECK(!parameters.empty(), path.string(), ": a model without parameters can't be saved");
  const DeviceMesh& mesh = largest_mesh(parameters);
  GatheredModel model(parameters, export_dtype);
  std::string failure;
  if (mesh.rank() == 0) {
    try {
      write_safetensors(path, model.entries(), {}, [&](size_t index) { return model.gather(index); });
    } catch (const Error& error) {
      failure = error.what();
    }
  }
  model.finish();
  bool failed = any_rank(mesh, !failure.empty());
  TITAN_CHECK(failure.empty(), failure);
  TITAN_CHECK(!failed, path.string(), ": rank 0 of the mesh couldn't write the model; its message says why");
}

}  // namespace titan
