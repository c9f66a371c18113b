#include "titan/parallel/parameters.h"

#include <algorithm>
#include <mutex>
#include <set>

#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include "parallel/fsdp/param_group.h"
#include "parallel/interned.h"
#include "parallel/tensor/split_params.h"
#include "tensor/memory.h"
#include "titan/core/error.h"
#include "titan/nn/containers.h"

namespace titan {

const char* interned(const std::string& text) {
  static std::mutex mutex;
  static std::set<std::string> texts;
  const std::lock_guard lock(mutex);
  return texts.insert(text).first->c_str();
}

namespace {

using fsdp::ParamGroup;

DTensor whole(const at::Tensor& tensor) {
  DTensor result;
  result.local = tensor;
  result.global_shape = tensor.sizes().vec();
  result.box = {std::vector<int64_t>(result.global_shape.size(), 0), result.global_shape};
  return result;
}

// Walks the modules, each with the group that manages its own parameters. Modules of LibTorch belong to the
// hookable module around them.
class ParameterList {
 public:
  void walk(torch::nn::Module& module, const std::string& prefix, ParamGroup* group) {
    const auto* host = dynamic_cast<const nn::HookHost*>(&module);
    if (host) group = dynamic_cast<ParamGroup*>(host->param_owner.get());
    for (const auto& named : module.named_parameters(/*recurse=*/false))
      add(prefix + named.key(), named.key(), named.value(), host, group);
    for (const auto& child : module.named_children()) walk(*child.value(), prefix + child.key() + ".", group);
  }
  std::vector<Parameter> take() { return std::move(list_); }

 private:
  void add(const std::string& full_name, const std::string& name, const at::Tensor& compute,
           const nn::HookHost* host, ParamGroup* group) {
    auto known = std::find_if(list_.begin(), list_.end(),
                              [&](const Parameter& p) { return p.compute.is_same(compute); });
    if (known == list_.end()) {
      known = list_.insert(known, {full_name, owned(compute, name, host, group), compute, {}, false, false});
    }
    if (!host) return;
    for (const nn::ParamInit& declared : host->param_inits()) {
      if (declared.name != name) continue;
      // For a tied parameter the last declaration counts, which is the output's, as in TorchTitan.
      known->init = declared.init;
      known->has_init = true;
    }
  }

  static DTensor owned(const at::Tensor& compute, const std::string& name, const nn::HookHost* host,
                       const ParamGroup* group) {
    const int64_t slot = group ? group->find(compute) : -1;
    DTensor data = slot >= 0 ? group->shard(static_cast<size_t>(slot)) : whole(compute);
    const tp::SplitParams* split = tp::split_params(host);
    const tp::PartOfParam* part = split ? split->find(name) : nullptr;
    if (part) return split->within_whole(std::move(data), *part);
    return data;
  }

  std::vector<Parameter> list_;
};

// A parameter shared between pipeline stages has its name in the whole model, so all copies are drawn with
// the same numbers.
void name_shared(std::vector<Parameter>& list, const nn::LayerSequence& sequence) {
  for (const nn::SharedParameter& shared : sequence.shared_parameters())
    for (Parameter& parameter : list) {
      if (!parameter.compute.is_same(shared.parameter)) continue;
      parameter.name = shared.name;
      parameter.init = shared.init.init;
      parameter.has_init = !shared.init.name.empty();
      parameter.on_other_stages = true;
    }
}

}  // namespace

std::vector<Parameter> parameters(const nn::AnyRef& root) {
  ParameterList list;
  list.walk(root.module(), "", dynamic_cast<ParamGroup*>(root.host().param_owner.get()));
  std::vector<Parameter> all = list.take();
  const nn::LayerSequence* sequence = nn::layer_sequence(root);
  if (sequence && !sequence->is_whole()) name_shared(all, *sequence);
  return all;
}

void materialize(const nn::AnyRef& root, uint64_t seed) {
  at::NoGradGuard no_grad;
  const std::vector<Parameter> list = parameters(root);
  std::vector<bool> deferred;
  for (const Parameter& parameter : list) deferred.push_back(is_deferred(parameter.data.local));
  const std::vector<nn::HookHost*> hosts = nn::hook_hosts(root.module());
  for (const nn::HookHost* host : hosts)
    if (auto* group = dynamic_cast<ParamGroup*>(host->param_owner.get())) group->allocate_shards();
  for (size_t i = 0; i < list.size(); ++i) {
    if (!deferred[i]) continue;
    const Parameter& parameter = list[i];
    TITAN_CHECK(parameter.has_init, "materialize: parameter '", parameter.name,
                "' is deferred, but its module declares no distribution for it");
    if (is_deferred(parameter.data.local)) param_storage::allocate(parameter.data.local);
    if (parameter.data.local.is_meta() || parameter.data.local.numel() == 0) continue;
    nn::fill(parameter.data.local.variable_data(), parameter.init, {seed, parameter.name},
             parameter.data.global_shape, parameter.data.box);
    torch::autograd::impl::bump_version(parameter.data.local);
  }
  // The compute parameter's device, because its shard may be in host memory.
  const at::Device device = list.empty() ? at::Device(at::kCPU) : list[0].compute.device();
  for (nn::HookHost* host : hosts) host->reset_buffers(device);
}

}  // namespace titan
