#include "titan/checkpoint/model_file.h"

#include <algorithm>
#include <map>
#include <set>
#include <sstream>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include "titan/checkpoint/safetensors.h"
#include "titan/core/error.h"
#include "titan/tensor/param_storage.h"

namespace titan {
namespace {

constexpr dist::Label kLabel{.phase = "checkpoint::save_model"};

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

// Of the pipelines side by side, each of which has a part of every stage, one carries whole tensors.
bool has_writer(const DeviceMesh& pipeline) { return pipeline.ranks().front() == 0; }

// What a stage has, as a line for its peers: dtype, shape, and the name, which may hold spaces.
std::string describe(const std::vector<SafetensorsEntry>& entries) {
  std::string text;
  for (const SafetensorsEntry& entry : entries) {
    text += titan::str(static_cast<int>(entry.dtype), " ", entry.shape.size());
    for (const int64_t size : entry.shape) text += titan::str(" ", size);
    text += " " + entry.name + "\n";
  }
  return text;
}

std::vector<SafetensorsEntry> parse_entries(const std::string& text) {
  std::vector<SafetensorsEntry> entries;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream fields(line);
    int dtype = 0;
    size_t dims = 0;
    fields >> dtype >> dims;
    SafetensorsEntry entry{"", static_cast<at::ScalarType>(dtype), std::vector<int64_t>(dims)};
    for (int64_t& size : entry.shape) fields >> size;
    fields.get();
    std::getline(fields, entry.name);
    entries.push_back(std::move(entry));
  }
  return entries;
}

// The tensors of the file in its order, each gathered from all ranks of its stage when it is asked for, and
// brought to the pipeline's first rank.
class GatheredModel {
 public:
  GatheredModel(const std::vector<Parameter>& parameters, std::optional<at::ScalarType> export_dtype,
                const DeviceMesh& pipeline)
      : pipeline_(pipeline) {
    std::vector<SafetensorsEntry> own;
    size_t saved = 0;
    for (const auto& parameter : parameters) {
      if (parameter.duplicate) continue;
      ++saved;
      parameters_.emplace(parameter.name, &parameter);
      at::ScalarType dtype = export_dtype.value_or(parameter.data.local.scalar_type());
      own.push_back({parameter.name, dtype, parameter.data.global_shape});
    }
    TITAN_CHECK(parameters_.size() == saved, "two parameters have the same name");
    collect_entries(own);
    sort_for_file(entries_);
  }

  const std::vector<SafetensorsEntry>& entries() const { return entries_; }

  /// Undefined on ranks that neither own nor write it.
  at::Tensor gather(size_t index) {
    next_ = index + 1;
    const SafetensorsEntry& entry = entries_[index];
    const int owner = owners_.at(entry.name);
    at::Tensor whole;
    if (owner == pipeline_.rank()) {
      const Parameter& parameter = *parameters_.at(entry.name);
      whole = full_tensor(parameter.data).to(entry.dtype).contiguous();
    }
    if (owner == 0 || !has_writer(pipeline_)) return whole;
    if (owner == pipeline_.rank()) pipeline_.group()->send(whole.view(-1), 0, kLabel).wait();
    if (pipeline_.rank() != 0) return whole;
    whole = at::empty(entry.shape, at::TensorOptions(device()).dtype(entry.dtype));
    pipeline_.group()->receive(whole.view(-1), owner, kLabel).wait();
    return whole;
  }

  /// The gathers that are left: the other ranks wait in them.
  void finish() {
    while (next_ < entries_.size()) gather(next_);
  }

 private:
  // Of a name on several stages the first one's is taken.
  void collect_entries(const std::vector<SafetensorsEntry>& own) {
    std::vector<std::string> texts = {describe(own)};
    if (pipeline_.size() > 1) texts = pipeline_.group()->all_gather_text(texts[0], kLabel);
    for (size_t rank = 0; rank < texts.size(); ++rank)
      for (SafetensorsEntry& entry : parse_entries(texts[rank]))
        if (owners_.emplace(entry.name, static_cast<int>(rank)).second) entries_.push_back(std::move(entry));
  }

  at::Device device() const {
    return parameters_.empty() ? at::Device(at::kCPU) : parameters_.begin()->second->data.local.device();
  }

  const DeviceMesh& pipeline_;
  std::map<std::string, const Parameter*> parameters_;
  std::map<std::string, int> owners_;  // position in the pipeline
  std::vector<SafetensorsEntry> entries_;
  size_t next_ = 0;
};

std::set<std::string> names_elsewhere(const std::vector<Parameter>& parameters, const DeviceMesh& pipeline) {
  std::set<std::string> names;
  if (pipeline.size() == 1) return names;
  std::string own;
  for (const Parameter& parameter : parameters) own += parameter.name + "\n";
  for (const std::string& text : pipeline.group()->all_gather_text(own, kLabel)) {
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) names.insert(line);
  }
  return names;
}

}  // namespace

void load_model(const std::vector<Parameter>& parameters, const std::filesystem::path& path,
                const DeviceMesh& pipeline) {
  const std::set<std::string> elsewhere = names_elsewhere(parameters, pipeline);
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
  GatheredModel model(parameters, export_dtype, pipeline);
  TITAN_CHECK(!model.entries().empty(), path.string(), ": a model without parameters can't be saved");
  const DeviceMesh mesh = parameters.empty() ? DeviceMesh() : largest_mesh(parameters);
  std::string failure;
  const bool writes = pipeline.size() > 1 ? has_writer(pipeline) && pipeline.rank() == 0 : mesh.rank() == 0;
  if (writes) {
    try {
      write_safetensors(path, model.entries(), {}, [&](size_t index) { return model.gather(index); });
    } catch (const Error& error) {
      failure = error.what();
    }
  }
  model.finish();
  const bool failed = any_rank(mesh, any_rank(pipeline, !failure.empty()));
  TITAN_CHECK(failure.empty(), failure);
  TITAN_CHECK(!failed, path.string(), ": rank 0 of the mesh couldn't write the model; its message says why");
}

}  // namespace titan
