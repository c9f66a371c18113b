#include "titan/train/checkpoint_state.h"

#include <map>
#include <mutex>

#include <ATen/Context.h>

#include "titan/core/error.h"

namespace titan::train {

namespace {

// A generator's state is a tensor on the CPU, whatever the generator's device.
at::Tensor state_of(at::Device device) {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void set_state(at::Device device, const at::Tensor& state) {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

// One row for each rank of a pipeline stage. Each stage has its own names, because their tensors differ.
DTensor rows_of_ranks(const DeviceMesh& stage, const at::Tensor& row) {
  DTensor rows{
      .local = row.unsqueeze(0).clone(),
      .mesh = stage,
      .placements = std::vector<Placement>(static_cast<size_t>(stage.num_axes()), Placement::shard(0)),
      .global_shape = {stage.size(), row.size(0)},
      .box = {}};
  rows.box = local_box(rows.global_shape, stage, rows.placements);
  return rows;
}

std::string describe_place(const Meshes& meshes, at::Device device) {
  std::string text;
  for (const MeshAxis& axis : meshes.world.axes()) text += str(axis.name, " ", axis.size, ", ");
  return text + (device.is_cpu() ? "cpu" : "gpu");
}

// SplitMix64's step: neighboring seeds give unrelated streams.
uint64_t mixed(uint64_t value) {
  value += 0x9e3779b97f4a7c15;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

DTensor without_graph(DTensor tensor) {
  tensor.local = tensor.local.detach();
  return tensor;
}

}  // namespace

ModelState::ModelState(std::vector<Parameter> parameters) : parameters_(std::move(parameters)) {}

checkpoint::ObjectState ModelState::state() {
  checkpoint::ObjectState state;
  for (const Parameter& parameter : parameters_)
    state.tensors.push_back({parameter.name, without_graph(parameter.data), parameter.duplicate});
  return state;
}

// The new version marks cached copies of a shard as stale, however the bytes were written.
void ModelState::loaded(const std::string&) {
  for (const Parameter& parameter : parameters_) parameter.data.local.unsafeGetTensorImpl()->bump_version();
}

OptimizerState::OptimizerState(optim::Optimizer& optimizer, const std::vector<Parameter>& parameters)
    : optimizer_(optimizer) {
  for (const Parameter& parameter : parameters)
    if (parameter.data.local.requires_grad()) copies_[parameter.name].push_back(parameter.duplicate);
}

checkpoint::ObjectState OptimizerState::state() {
  checkpoint::ObjectState state;
  std::map<std::string, size_t> seen;
  for (const auto& [name, tensors] : optimizer_.state()) {
    const auto copies = copies_.find(name);
    const size_t copy = seen[name]++;
    TITAN_CHECK(copies != copies_.end() && copy < copies->second.size(), "the optimizer steps parameter '",
                name, "', which is not in the list of parameters whose state is to be saved");
    const bool duplicate = copies->second[copy];
    for (const auto& [key, tensor] : tensors)
      state.tensors.push_back({str(name, ".", key), tensor, duplicate});
  }
  return state;
}

void OptimizerState::loaded(const std::string&) {}

TextState::TextState(std::function<std::string()> save, std::function<void(const std::string&)> load)
    : save_(std::move(save)), load_(std::move(load)) {}

checkpoint::ObjectState TextState::state() { return {.tensors = {}, .text = save_()}; }

void TextState::loaded(const std::string& text) { load_(text); }

RngState::RngState(const Meshes& meshes, at::Device device, uint64_t seed)
    : place_(describe_place(meshes, device)), seed_(seed), position_(meshes.loss.rank()) {
  std::vector<std::string> axes;
  for (const MeshAxis& axis : meshes.world.axes())
    if (axis.name != "pp") axes.push_back(axis.name);
  const DeviceMesh stage = meshes.world(axes);
  const auto add = [&](const char* kind, at::Device of) {
    generators_.push_back({str("pp", meshes.pp.rank(), ".", kind), of, rows_of_ranks(stage, state_of(of))});
  };
  add("cpu", at::kCPU);
  if (!device.is_cpu()) add("gpu", device);
}

checkpoint::ObjectState RngState::state() {
  checkpoint::ObjectState state{.tensors = {}, .text = place_};
  for (Generator& generator : generators_) {
    generator.states.local[0].copy_(state_of(generator.device));
    state.tensors.push_back({generator.name, generator.states});
  }
  return state;
}

void RngState::loaded(const std::string&) {
  for (const Generator& generator : generators_)
    set_state(generator.device, generator.states.local[0].clone());
}

void RngState::reseed(int64_t step) {
  at::manual_seed(mixed(seed_ + static_cast<uint64_t>(position_)) + static_cast<uint64_t>(step));
}

}  // namespace titan::train
