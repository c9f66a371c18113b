#include "gathered_model.h"

#include <algorithm>
#include <exception>
#include <sstream>

#include <ATen/ops/empty.h>

#include "titan/core/error.h"

namespace titan::detail {
namespace {

constexpr dist::Label kLabel{.phase = "checkpoint::save_model"};

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

}  // namespace

GatheredModel::GatheredModel(const std::vector<Parameter>& parameters,
                             std::optional<at::ScalarType> export_dtype, const DeviceMesh& pipeline)
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

at::Tensor GatheredModel::gather(size_t index) {
  next_ = index + 1;
  const SafetensorsEntry& entry = entries_[index];
  const int owner = owners_.at(entry.name);
  at::Tensor whole;
  if (owner == pipeline_.rank()) {
    const Parameter& parameter = *parameters_.at(entry.name);
    whole = full_tensor(parameter.data).to(entry.dtype).contiguous();
  }
  if (owner == 0 || !has_writer(pipeline_)) return whole;
  // From host to host: the writer may have no parameter that tells its device, and no room there to spare.
  if (owner == pipeline_.rank()) pipeline_.group()->send(whole.cpu().view(-1), 0, kLabel).wait();
  if (pipeline_.rank() != 0) return whole;
  whole = at::empty(entry.shape, at::TensorOptions().dtype(entry.dtype));
  pipeline_.group()->receive(whole.view(-1), owner, kLabel).wait();
  return whole;
}

void GatheredModel::finish() {
  while (next_ < entries_.size()) gather(next_);
}

void GatheredModel::collect_entries(const std::vector<SafetensorsEntry>& own) {
  std::vector<std::string> texts = {describe(own)};
  if (pipeline_.size() > 1) texts = pipeline_.group()->all_gather_text(texts[0], kLabel);
  for (size_t rank = 0; rank < texts.size(); ++rank)
    for (SafetensorsEntry& entry : parse_entries(texts[rank]))
      if (owners_.emplace(entry.name, static_cast<int>(rank)).second) entries_.push_back(std::move(entry));
}

std::set<std::string> names_of_pipeline(const std::vector<Parameter>& parameters,
                                        const DeviceMesh& pipeline) {
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

void write_gathered(const std::vector<Parameter>& parameters, const std::filesystem::path& path,
                    std::optional<at::ScalarType> export_dtype, const DeviceMesh& pipeline,
                    const std::function<void(GatheredModel&)>& write) {
  GatheredModel model(parameters, export_dtype, pipeline);
  TITAN_CHECK(!model.entries().empty(), path.string(), ": a model without parameters can't be saved");
  const DeviceMesh mesh = parameters.empty() ? DeviceMesh() : largest_mesh(parameters);
  std::string failure;
  const bool writes = pipeline.size() > 1 ? has_writer(pipeline) && pipeline.rank() == 0 : mesh.rank() == 0;
  if (writes) {
    try {
      write(model);
    } catch (const std::exception& error) {  // the peers are waiting, whatever it is
      failure = error.what();
    }
  }
  model.finish();
  const bool failed = any_rank(mesh, any_rank(pipeline, !failure.empty()));
  TITAN_CHECK(failure.empty(), failure);
  TITAN_CHECK(!failed, path.string(), ": rank 0 of the mesh couldn't write the model; its message says why");
}

}  // namespace titan::detail
