#include "titan/parallel/fsdp.h"

#include <algorithm>

#include <torch/nn/module.h>

#include "parallel/fsdp/fsdp_state.h"
#include "parallel/fsdp/host_shards.h"
#include "parallel/tensor/split_params.h"
#include "titan/core/error.h"

namespace titan {

namespace {

using fsdp::FsdpState;
using fsdp::ManagedParam;
using fsdp::ParamGroup;

// The parameters below a module that no earlier call took; the same tensor under several names is one
// parameter.
class ParamCollector {
 public:
  void collect(torch::nn::Module& module, const std::string& prefix) {
    auto* host = dynamic_cast<nn::HookHost*>(&module);
    if (host && host->param_owner) return;
    if (host) hosts_.push_back(host);
    for (const auto& named : module.named_parameters(/*recurse=*/false))
      add(host, named.key(), named.value(), prefix);
    for (const auto& child : module.named_children()) {
      const auto* child_host = dynamic_cast<nn::HookHost*>(child.value().get());
      if (child_host && child_host->fsdp_hook) continue;
      collect(*child.value(), prefix + child.key() + ".");
    }
  }
  std::vector<ManagedParam>& params() { return params_; }
  const std::vector<nn::HookHost*>& hosts() const { return hosts_; }

 private:
  void add(nn::HookHost* host, const std::string& name, const at::Tensor& tensor, const std::string& prefix) {
    auto known = std::find_if(params_.begin(), params_.end(),
                              [&](const ManagedParam& param) { return param.compute.is_same(tensor); });
    if (known == params_.end()) known = params_.insert(known, {tensor, {}, prefix + name});
    known->uses.push_back({host, name});
    const tp::SplitParams* split = host ? tp::split_params(*host) : nullptr;
    const tp::PartOfParam* part = split ? split->find(name) : nullptr;
    if (part && part->gradient_is_summand) known->summand_axis = split->axis();
  }

  std::vector<ManagedParam> params_;
  std::vector<nn::HookHost*> hosts_;
};

void check_modules(const std::vector<nn::AnyRef>& modules) {
  TITAN_CHECK(!modules.empty(), "fully_shard: an empty list of modules");
  for (const nn::AnyRef& module : modules)
    TITAN_CHECK(!module.host().fsdp_hook, "fully_shard: '", module.module().name(), "' is wrapped already");
}

// There is no other memory to keep the shards in.
void check_offload(const std::vector<nn::AnyRef>& modules, const FsdpOptions& options) {
  if (!options.cpu_offload) return;
  for (const nn::AnyRef& module : modules)
    for (const auto& named : module.module().named_parameters())
      TITAN_CHECK(named.value().is_cuda(),
                  "fully_shard: cpu_offload keeps shards in pinned host memory beside a GPU, but parameter '",
                  named.key(), "' of '", module.module().name(), "' is on ", named.value().device());
}

// A smaller mesh of one rank means to keep what was gathered.
FsdpOptions normalized(FsdpOptions options) {
  ReshardAfterForward& policy = options.reshard_after_forward;
  if (policy.kind == ReshardAfterForward::Kind::ToSize && policy.size == 1)
    policy = ReshardAfterForward::never();
  return options;
}

void shard_together(const std::vector<nn::AnyRef>& modules, const FsdpOptions& options) {
  check_modules(modules);
  ParamCollector collector;
  for (const nn::AnyRef& module : modules) collector.collect(module.module(), "");
  std::shared_ptr<ParamGroup> group;
  if (!collector.params().empty())
    group = ParamGroup::create(std::move(collector.params()), normalized(options));
  std::vector<nn::HookHost*> hosts;
  for (const nn::AnyRef& module : modules) hosts.push_back(&module.host());
  auto state = std::make_shared<FsdpState>(hosts, group, options);
  for (nn::HookHost* host : hosts) host->fsdp_hook = state;
  for (nn::HookHost* host : collector.hosts()) host->param_owner = group;
}

}  // namespace

void fully_shard(const nn::AnyRef& module, const FsdpOptions& options) { fully_shard({module}, options); }

void fully_shard(std::initializer_list<nn::AnyRef> modules, const FsdpOptions& options) {
  check_offload(modules, options);
  shard_together(modules, options);
}

void fsdp::fully_shard_beside_any_device(std::initializer_list<nn::AnyRef> modules,
                                         const FsdpOptions& options) {
  shard_together(modules, options);
}

// All below a sharded root share its context; without one, each sharded module below is a root of its own.
void set_last_micro_batch(const nn::AnyRef& root, bool last) {
  if (const auto state = std::dynamic_pointer_cast<FsdpState>(root.host().fsdp_hook))
    return state->set_last_micro_batch(last);
  for (const auto& state : fsdp::states_below(root.module())) state->set_last_micro_batch(last);
}

void discard_gradients(const nn::AnyRef& root) {
  const auto root_state = std::dynamic_pointer_cast<FsdpState>(root.host().fsdp_hook);
  if (root_state && root_state->context()) return root_state->context()->discard_gradients();
  for (const auto& state : fsdp::states_below(root.module()))
    if (state->group()) state->group()->discard_gradients();
}

FsdpStats fsdp_stats(const nn::AnyRef& root) {
  FsdpStats stats;
  std::vector<fsdp::CommContext*> contexts;
  for (const auto& state : fsdp::states_below(root.module())) {
    if (state->group()) {
      ++stats.groups;
      stats.sharded_bytes += state->group()->sharded_bytes();
      stats.kept_gradient_bytes += state->group()->kept_gradient_bytes();
    }
    fsdp::CommContext* context = state->context().get();
    if (!context || std::find(contexts.begin(), contexts.end(), context) != contexts.end()) continue;
    contexts.push_back(context);
    stats.gathered_groups += context->num_gathered;
    stats.max_gathered_groups += std::exchange(context->max_gathered, context->num_gathered);
    stats.communication_buffer_allocations += context->pool.num_allocations();
  }
  return stats;
}

}  // namespace titan
