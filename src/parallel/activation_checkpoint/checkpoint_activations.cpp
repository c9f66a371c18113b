// Gives each layer of a model the hook that recomputes or offloads its activations.

#include "titan/parallel/activation_checkpoint.h"

#include <algorithm>

#include <torch/nn/module.h>

#include "parallel/activation_checkpoint/budget.h"
#include "parallel/activation_checkpoint/offload.h"
#include "parallel/activation_checkpoint/recompute.h"
#include "titan/core/error.h"

namespace titan {

namespace {

using namespace activations;

std::string name_of(const nn::AnyRef& module) {
  const std::string& fqn = module.host().fqn();
  return fqn.empty() ? module.module().name() : fqn;
}

void set_hook(const nn::AnyRef& module, std::shared_ptr<nn::CheckpointHook> hook) {
  TITAN_CHECK(!module.host().checkpoint_hook, "checkpoint_activations: '", name_of(module),
              "' is checkpointed already");
  install_saved_tensor_hooks();
  module.host().checkpoint_hook = std::move(hook);
}

at::Device device_of(const nn::AnyRef& module) {
  const auto parameters = module.module().parameters();
  return parameters.empty() ? at::Device(at::kCPU) : parameters[0].device();
}

std::shared_ptr<Offloader> make_offloader(const nn::AnyRef& module, const OffloadActivations& policy) {
  const at::Device device = device_of(module);
  TITAN_CHECK(!device.is_cpu(),
              "checkpoint_activations: OffloadActivations moves activations from a GPU to the "
              "host's memory, but '",
              name_of(module), "' is on the CPU already; use FullRecompute, SelectiveOp or MemoryBudget");
  TITAN_CHECK(policy.min_bytes >= 0 && policy.layers_kept >= 0,
              "checkpoint_activations: min_bytes and layers_kept can't be negative, got ", policy.min_bytes,
              " and ", policy.layers_kept);
  return std::make_shared<Offloader>(OffloadSettings{.device = device, .min_bytes = policy.min_bytes});
}

/// Gives each of the layers its hook.
struct ApplyToLayers {
  const std::vector<nn::AnyRef>& layers;
  const ActivationCheckpointOptions& options;
  int64_t first_number;

  void operator()(const FullRecompute& /*policy*/) const {
    for (const nn::AnyRef& layer : layers) set_hook(layer, std::make_shared<RecomputeHook>(options));
  }

  void operator()(const SelectiveOp& policy) const {
    for (const nn::AnyRef& layer : layers)
      set_hook(layer,
               std::make_shared<RecomputeHook>(options, std::make_shared<ProductChoice>(layer, policy)));
  }

  void operator()(const SelectiveLayers& policy) const {
    TITAN_CHECK(policy.n >= 1, "checkpoint_activations: every n-th layer with n = ", policy.n,
                "; n has to be at least 1");
    for (size_t i = 0; i < layers.size(); ++i)
      if ((first_number + static_cast<int64_t>(i) + 1) % policy.n == 0)
        set_hook(layers[i], std::make_shared<RecomputeHook>(options));
  }

  void operator()(const OffloadActivations& policy) const {
    const auto offloader = make_offloader(layers[0], policy);
    const auto num_layers = static_cast<int64_t>(layers.size());
    for (int64_t i = 0; i < num_layers; ++i)
      set_hook(layers[static_cast<size_t>(i)],
               std::make_shared<OffloadHook>(offloader, i == 0, i >= num_layers - policy.layers_kept));
  }

  void operator()(const MemoryBudget& policy) const {
    TITAN_CHECK(policy.bytes >= 0 || (policy.fraction >= 0 && policy.fraction <= 1),
                "checkpoint_activations: a memory budget needs bytes >= 0 or a fraction from 0 to 1, got ",
                policy.bytes, " and ", policy.fraction);
    const LayerHooks make_hook = budget_hooks(policy, layers.size(), options);
    for (size_t i = 0; i < layers.size(); ++i) set_hook(layers[i], make_hook(i, layers[i]));
  }
};

}  // namespace

void checkpoint_activations(const nn::AnyRef& module, const ModulePolicy& policy,
                            const ActivationCheckpointOptions& options) {
  const std::vector<nn::AnyRef> alone{module};
  std::visit(ApplyToLayers{alone, options, 0}, policy);
}

void checkpoint_activations(const std::vector<nn::AnyRef>& layers, const LayersPolicy& policy,
                            const ActivationCheckpointOptions& options, int64_t first_number) {
  if (layers.empty()) return;
  std::visit(ApplyToLayers{layers, options, first_number}, policy);
}

bool checkpoints_activations(const nn::AnyRef& root) {
  const auto hosts = nn::hook_hosts(root.module());
  return std::any_of(hosts.begin(), hosts.end(),
                     [](const auto* host) { return host->checkpoint_hook != nullptr; });
}

}  // namespace titan
