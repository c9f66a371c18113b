#include "parallel/activation_checkpoint/saved_tensor_hooks.h"

#include <algorithm>
#include <utility>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include "titan/core/error.h"

namespace titan::activations {

namespace {

using torch::autograd::edge_list;
using torch::autograd::Engine;
using torch::autograd::variable_list;

thread_local SavedTensorHooks* current_hooks = nullptr;

// LibTorch starts the devices' threads once per process, for the first engine that runs a backward. Backwards
// therefore run in the base engine: if it had run one before, this engine would have no thread for a GPU.
class HookedEngine final : public Engine {
 public:
  variable_list execute(const edge_list& roots, const variable_list& inputs, bool keep_graph,
                        bool create_graph, bool accumulate_grad, const edge_list& outputs) override {
    return get_base_engine().execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }
  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(
      const std::shared_ptr<torch::autograd::GraphTask>& graph_task,
      std::shared_ptr<torch::autograd::Node> graph_root,
      torch::autograd::InputBuffer&& input_buffer) override {
    return get_base_engine().execute_with_graph_task(graph_task, std::move(graph_root),
                                                     std::move(input_buffer));
  }
  std::unique_ptr<SavedVariableHooks> get_default_saved_variable_hooks() override {
    return current_hooks ? current_hooks->make() : nullptr;
  }
};

Engine& hooked_engine() {
  static HookedEngine engine;
  return engine;
}

}  // namespace

HooksScope::HooksScope(SavedTensorHooks* hooks)
    : previous_(std::exchange(current_hooks, hooks)), dropping_(hooks && hooks->drop_tensors()) {}

HooksScope::~HooksScope() { current_hooks = previous_; }

void install_saved_tensor_hooks() {
  static const bool installed = [] {
    TITAN_CHECK(&Engine::get_default_engine() == &Engine::get_base_engine(),
                "activation checkpointing extends LibTorch's own autograd engine, but another one (Python's, "
                "after `import torch`?) runs the backwards of this process");
    torch::autograd::set_default_engine_stub(&hooked_engine);
    return true;
  }();
  (void)installed;
}

at::Tensor without_graph(const at::Tensor& tensor) {
  at::Tensor bare = torch::autograd::make_variable(tensor, /*requires_grad=*/false);
  torch::autograd::impl::set_version_counter(bare, torch::autograd::impl::version_counter(tensor));
  return bare;
}

ParameterStorages::ParameterStorages(const torch::nn::Module& module, Buffers buffers) {
  std::vector<at::Tensor> tensors = module.parameters();
  if (buffers == Buffers::With)
    for (at::Tensor& buffer : module.buffers()) tensors.push_back(std::move(buffer));
  for (const at::Tensor& tensor : tensors)
    if (tensor.has_storage()) storages_.push_back(tensor.storage().unsafeGetStorageImpl());
  std::sort(storages_.begin(), storages_.end());
}

bool ParameterStorages::contains(const at::Tensor& tensor) const {
  return tensor.has_storage() &&
         std::binary_search(storages_.begin(), storages_.end(), tensor.storage().unsafeGetStorageImpl());
}

}  // namespace titan::activations
