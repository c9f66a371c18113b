// A job's model alone, read into and gathered from the shards of any mesh: as one safetensors file with our
// names, or as a Hugging Face folder.

#include <algorithm>
#include <exception>
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

constexpr dist::Label kLabel{.phase = "checkpoint::save_model"};

// ---- gathering

const DeviceMesh& largest_mesh(const std::vector<Parameter>& parameters) {
  auto size = [](const Parameter& parameter) { return parameter.data.mesh.size(); };
  return std::max_element(parameters.begin(), parameters.end(),
                          [&](const Parameter& a, const Parameter& b) { return size(a) < size(b); })
      ->data.mesh;
}

// True on all ranks of the mesh where it is true on one: the maximum along each axis in turn.
bool any_rank(const DeviceMesh& mesh, bool value) {
  double flag = value;
  for (const auto& axis : mesh.axes()) {
    if (axis.size > 1) flag = mesh.group(axis.name)->max(flag, kLabel);
  }
  return flag > 0;
}

// Parallel pipelines each have a part of every stage; one of them carries whole tensors.
bool has_writer(const DeviceMesh& pipeline) { return pipeline.ranks().front() == 0; }

// A stage's description of a tensor for its peers.
struct SentEntry : SafetensorsEntry {
  static void fields(auto& wire, auto& self) { wire(self.name, self.dtype, self.shape); }
};

// The tensors of the file in its order (sort_for_file). Each is gathered from all ranks of its stage when it
// is requested, and sent to the pipeline's first rank. A name on several stages is taken from the first.
class GatheredModel {
 public:
  // Collective over the pipeline.
  GatheredModel(const std::vector<Parameter>& parameters, std::optional<at::ScalarType> export_dtype,
                const DeviceMesh& pipeline)
      : pipeline_(pipeline) {
    std::vector<SentEntry> own;
    for (const auto& parameter : parameters) {
      if (parameter.duplicate) continue;
      TITAN_CHECK(parameters_.emplace(parameter.name, &parameter).second,
                  "two parameters have the same name, '", parameter.name, "'");
      at::ScalarType dtype = export_dtype.value_or(parameter.data.local.scalar_type());
      own.push_back({{parameter.name, dtype, parameter.data.global_shape}});
    }
    std::vector<std::string> texts = {checkpoint::detail::to_wire(own)};
    if (pipeline_.size() > 1) texts = pipeline_.group()->all_gather_text(texts[0], kLabel);
    for (size_t rank = 0; rank < texts.size(); ++rank)
      for (SentEntry& entry : checkpoint::detail::from_wire<std::vector<SentEntry>>(texts[rank]))
        if (owners_.emplace(entry.name, static_cast<int>(rank)).second) entries_.push_back(std::move(entry));
    sort_for_file(entries_);
  }

  const std::vector<SafetensorsEntry>& entries() const { return entries_; }

  // Collective, called in order. Returns an undefined tensor on ranks that neither own nor write it.
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
    // Sent between hosts' memory: the writer may have no parameter that shows its device, and no room there.
    if (owner == pipeline_.rank()) pipeline_.group()->send(whole.cpu().view(-1), 0, kLabel).wait();
    if (pipeline_.rank() != 0) return whole;
    whole = at::empty(entry.shape, at::TensorOptions().dtype(entry.dtype));
    pipeline_.group()->receive(whole.view(-1), owner, kLabel).wait();
    return whole;
  }

  // Makes the remaining gathers, in which the other ranks wait.
  void finish() {
    while (next_ < entries_.size()) gather(next_);
  }

 private:
  const DeviceMesh& pipeline_;
  std::map<std::string, const Parameter*> parameters_;
  std::map<std::string, int> owners_;  // position in the pipeline
  std::vector<SafetensorsEntry> entries_;
  size_t next_ = 0;
};

// Calls `write` on rank 0 of the largest mesh (in a pipeline, of the world); the other ranks take part in its
// gathers. When it throws, every rank throws Error.
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
    } catch (const std::exception& error) {  // whatever it is, the peers are waiting
      failure = error.what();
    }
  }
  model.finish();
  const bool failed = any_rank(mesh, any_rank(pipeline, !failure.empty()));
  TITAN_CHECK(failure.empty(), failure);
  TITAN_CHECK(!failed, path.string(), ": rank 0 of the mesh couldn't write the model; its message says why");
}

// ---- comparing names

void check_materialized(const Parameter& parameter) {
  TITAN_CHECK(!is_deferred(parameter.data.local), "parameter '", parameter.name,
              "' has no memory yet: materialize() the model first");
}

// Why `file` doesn't hold the weights of `parameters` and of the other stages, whose names are among
// `expected`, a line each.
std::vector<std::string> differences(const std::vector<Parameter>& parameters,
                                     const std::set<std::string>& expected, const SafetensorsFile& file) {
  std::vector<std::string> problems;
  const std::string path = file.path().string();
  for (const auto& parameter : parameters) {
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
  return differences(parameters, names, SafetensorsFile(path));
}

void load_model(const std::vector<Parameter>& parameters, const std::filesystem::path& path,
                const DeviceMesh& pipeline) {
  std::vector<std::string> own;
  for (const Parameter& parameter : parameters) own.push_back(parameter.name);
  const auto expected = checkpoint::detail::names_of_stages(own, pipeline, kLabel);
  SafetensorsFile file(path);
  auto problems = differences(parameters, expected, file);
  if (!problems.empty()) throw ConfigError(std::move(problems));
  at::NoGradGuard no_grad;
  for (const auto& parameter : parameters) {
    check_materialized(parameter);
    at::Tensor local = parameter.data.local;
    local.copy_(file.read_slice(parameter.name, parameter.data.box));
  }
}

void save_model(const std::vector<Parameter>& parameters, const std::filesystem::path& path,
                std::optional<at::ScalarType> export_dtype, const DeviceMesh& pipeline) {
  write_gathered(parameters, path, export_dtype, pipeline, [&](GatheredModel& model) {
    write_safetensors(path, model.entries(), {}, [&](size_t index) { return model.gather(index); });
  });
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

void save_hf_model(const std::vector<Parameter>& parameters, const HfModel& model,
                   const std::filesystem::path& folder, const HfSaveOptions& options) {
  const ByName tensors = by_name(model);
  at::NoGradGuard no_grad;
  write_gathered(parameters, folder, options.export_dtype, options.pipeline, [&](GatheredModel& gathered) {
    std::vector<HfEntry> entries;
    for (const SafetensorsEntry& entry : gathered.entries())
      entries.push_back({&tensor_of(tensors, entry.name, entry.shape), entry.dtype});
    TITAN_CHECK(entries.size() == tensors.size(), folder.string(), ": the model has ", entries.size(),
                " parameters, Hugging Face's form of it ", tensors.size());
    write_hf_folder(folder, model, entries, options.folder, [&](size_t index, const AppendTensor& append) {
      append(reorder_rows(gathered.gather(index), entries[index].tensor->rotary_head_dim,
                          RowOrder::HuggingFace));
    });
  });
}

}  // namespace titan
