// The hooks of a sharded module: they gather its parameters before it runs and reduce its gradients after.

#include <algorithm>
#include <functional>

#include <torch/csrc/autograd/function.h>
#include <torch/nn/module.h>

#include "core/units.h"
#include "ops/autograd_node.h"
#include "parallel/fsdp/fsdp_state.h"
#include "parallel/fsdp/gradient_collector.h"
#include "parallel/tensor/split_params.h"
#include "titan/core/error.h"
#include "titan/core/log.h"
#include "titan/parallel/fsdp.h"

namespace titan::fsdp {

namespace {

// Calls `done` when the gradients of all of a module's inputs are complete, so its backward has ended.
class AfterBackward : public torch::autograd::Node {
 public:
  explicit AfterBackward(std::function<void()> done) : done_(std::move(done)) {}

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    done_();
    return std::move(grads);
  }
  std::string name() const override { return "FsdpAfterBackward"; }

 private:
  std::function<void()> done_;
};

// Calls `needed` when the gradient of an output arrives. Returns false if no output requires a gradient.
bool call_before_backward(const nn::TensorRefs& outputs, const std::function<void()>& needed) {
  bool any = false;
  for (at::Tensor* output : outputs) {
    if (!output->requires_grad()) continue;
    output->register_hook([needed](const at::Tensor&) { needed(); });
    any = true;
  }
  return any;
}

void cast(const nn::TensorRefs& tensors, at::ScalarType dtype) {
  for (at::Tensor* tensor : tensors)
    if (tensor->is_floating_point() && tensor->scalar_type() != dtype) *tensor = tensor->to(dtype);
}

}  // namespace

std::vector<std::shared_ptr<FsdpState>> states_below(torch::nn::Module& root) {
  std::vector<std::shared_ptr<FsdpState>> states;
  for (const nn::HookHost* host : nn::hook_hosts(root)) {
    auto state = std::dynamic_pointer_cast<FsdpState>(host->fsdp_hook);
    if (state && std::find(states.begin(), states.end(), state) == states.end())
      states.push_back(std::move(state));
  }
  return states;
}

void FsdpState::become_root(nn::HookHost& host) {
  is_root_ = true;
  if (host.fqn().empty()) nn::name_modules(host.as_module());
  const at::Device device = [&] {
    for (const auto& state : states_below(host.as_module()))
      if (state->group_) return state->group_->param(0).compute.device();
    return at::Device(at::kCPU);
  }();
  auto context = std::make_shared<CommContext>(device);
  context->set_last_micro_batch(last_micro_batch_);
  for (const auto& state : states_below(host.as_module())) {
    TITAN_CHECK(!state->context_, "'", state->modules_[0]->fqn(),
                "' has run a forward on its own before the forward of the sharded module around it; call the "
                "outermost one first");
    state->context_ = context;
    if (state->group_) state->group_->join(*context, state->modules_[0]->fqn());
  }
  if (group_) group_->make_root();
  tell_kept_gradients(host);
}

void FsdpState::tell_kept_gradients(nn::HookHost& host) {
  int64_t bytes = 0;
  for (const auto& state : states_below(host.as_module()))
    if (state->group_ && !state->group_->param(0).compute.is_meta())  // a dry run keeps no gradients
      bytes += state->group_->gradients().kept_bytes();
  if (bytes > 0)
    log::info_rank0(str("whole gradients stay between micro-batches: ", static_cast<double>(bytes) / kMiB,
                        " MiB on each rank"));
}

void FsdpState::set_last_micro_batch(bool last) {
  last_micro_batch_ = last;
  if (context_) context_->set_last_micro_batch(last);
}

void FsdpState::pre_forward(nn::HookHost& host, const nn::TensorRefs& inputs) {
  if (!context_) become_root(host);
  if (context_->scheduled()) return pre_scheduled_forward(inputs);
  if (is_root_) context_->begin_forward();
  if (options_.cast_forward_inputs && options_.param_dtype) cast(inputs, *options_.param_dtype);
  // Each forward counts anew, because an earlier one may have skipped modules of the group.
  if (std::exchange(forward_, context_->num_forwards()) != context_->num_forwards()) modules_entered_ = 0;
  if (!group_ || modules_entered_++ > 0) return;
  visit_ = context_->visit(group_);
  if (visit_ < 0) return;
  // The hooks live in the graph, which usually doesn't outlive the context's owner, the model. A weak pointer
  // covers the case that it does.
  const auto node = std::make_shared<AfterBackward>(
      [context = std::weak_ptr(context_), iteration = context_->iteration(), visit = visit_] {
        if (const auto alive = context.lock()) alive->post_backward(iteration, visit);
      });
  if (!ops::insert_identity(node, inputs)) context_->reduce_at_end(visit_);
}

// The schedule decides when backwards run. Only the last one adds a node to the graph, to reduce its groups one by one.
void FsdpState::pre_scheduled_forward(const nn::TensorRefs& inputs) {
  if (options_.cast_forward_inputs && options_.param_dtype) cast(inputs, *options_.param_dtype);
  if (!group_) return;
  group_->finish_unshard();
  TITAN_CHECK(group_->gathered(), "'", group_->name(),
              "' was called while its parameters are freed: its stage has to be unsharded first");
  group_->remember_stream();
  watch_last_backward(inputs);
}

// A group whose inputs require no gradient is reduced by the schedule's own action.
void FsdpState::watch_last_backward(const nn::TensorRefs& inputs) {
  if (!context_->last_forward() || !at::GradMode::is_enabled()) return;
  if (std::exchange(forward_, context_->num_forwards()) != context_->num_forwards()) modules_entered_ = 0;
  if (modules_entered_++ > 0) return;
  const auto node =
      std::make_shared<AfterBackward>([context = std::weak_ptr(context_), group = std::weak_ptr(group_)] {
        const auto alive = context.lock();
        const auto ended = group.lock();
        if (alive && ended) alive->end_of_backward(*ended);
      });
  if (ops::insert_identity(node, inputs)) context_->expect_end(*group_);
}

void FsdpState::post_forward(nn::HookHost& /*host*/, const nn::TensorRefs& outputs) {
  if (options_.output_dtype) cast(outputs, *options_.output_dtype);
  if (context_->scheduled()) {
    if (modules_entered_ == modules_.size()) modules_entered_ = 0;
    return;
  }
  const auto before_backward = [context = std::weak_ptr(context_), iteration = context_->iteration(),
                                visit = visit_] {
    if (const auto alive = context.lock()) alive->pre_backward(iteration, visit);
  };
  if (group_ && visit_ >= 0 && call_before_backward(outputs, before_backward))
    context_->expect_backward(visit_);
  if (group_ && modules_entered_ == modules_.size()) {
    modules_entered_ = 0;
    group_->after_forward();
  }
  if (is_root_) context_->end_forward();
}

}  // namespace titan::fsdp

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
    const tp::SplitParams* split = tp::split_params(host);
    const tp::PartOfParam* part = split ? split->find(name) : nullptr;
    if (part && part->gradient_is_summand) known->summand_axis = split->axis;
  }

  std::vector<ManagedParam> params_;
  std::vector<nn::HookHost*> hosts_;
};

void check_modules(const std::vector<nn::AnyRef>& modules) {
  TITAN_CHECK(!modules.empty(), "fully_shard: an empty list of modules");
  for (const nn::AnyRef& module : modules)
    TITAN_CHECK(!module.host().fsdp_hook, "fully_shard: '", module.module().name(), "' is wrapped already");
}

// On a CPU, cpu_offload makes no sense: there is no other memory for the shards.
void check_offload(const std::vector<nn::AnyRef>& modules, const FsdpOptions& options) {
  if (!options.cpu_offload) return;
  for (const nn::AnyRef& module : modules)
    for (const auto& named : module.module().named_parameters())
      TITAN_CHECK(named.value().is_cuda(),
                  "fully_shard: cpu_offload keeps shards in pinned host memory beside a GPU, but parameter '",
                  named.key(), "' of '", module.module().name(), "' is on ", named.value().device());
}

// Resharding to a mesh of one rank means keeping the gathered parameters.
FsdpOptions normalized(FsdpOptions options) {
  TITAN_CHECK(options.prefetch >= 0, "fully_shard: prefetch is ", options.prefetch,
              ", which must not be negative");
  TITAN_CHECK(
      !options.register_buffers || !options.cpu_offload,
      "fully_shard: register_buffers can't be combined with cpu_offload, which reduces into host memory");
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

const FsdpState& state_of(const nn::AnyRef& module) {
  const auto* state = dynamic_cast<const FsdpState*>(module.host().fsdp_hook.get());
  TITAN_CHECK(state, "prefetching: '", module.module().name(), "' wasn't given to fully_shard");
  return *state;
}

// Modules whose parameters all belong to other groups gather nothing.
ParamGroup::Groups groups_of(const std::vector<nn::AnyRef>& modules) {
  ParamGroup::Groups groups;
  for (const nn::AnyRef& module : modules)
    if (const auto& group = state_of(module).group()) groups.push_back(group);
  return groups;
}

ParamGroup& group_of(const nn::AnyRef& module) {
  const auto& group = state_of(module).group();
  TITAN_CHECK(group, "prefetching: all parameters below '", module.module().name(),
              "' belong to other calls of fully_shard, so nothing is gathered for it");
  return *group;
}

}  // namespace

void set_forward_prefetch(const nn::AnyRef& module, const std::vector<nn::AnyRef>& next) {
  group_of(module).set_forward_prefetch(groups_of(next));
}

void set_backward_prefetch(const nn::AnyRef& module, const std::vector<nn::AnyRef>& next) {
  group_of(module).set_backward_prefetch(groups_of(next));
}

void fully_shard(const nn::AnyRef& module, const FsdpOptions& options) { fully_shard({module}, options); }

void fully_shard(std::initializer_list<nn::AnyRef> modules, const FsdpOptions& options) {
  check_offload(modules, options);
  shard_together(modules, options);
}

void fsdp::fully_shard_beside_any_device(std::initializer_list<nn::AnyRef> modules,
                                         const FsdpOptions& options) {
  shard_together(modules, options);
}

// All states below a sharded root share its context. Without a sharded root, each sharded module below is a
// root itself.
void set_last_micro_batch(const nn::AnyRef& root, bool last) {
  if (const auto state = std::dynamic_pointer_cast<FsdpState>(root.host().fsdp_hook))
    return state->set_last_micro_batch(last);
  for (const auto& state : fsdp::states_below(root.module())) state->set_last_micro_batch(last);
}

void fsdp::reshard_all(torch::nn::Module& root) {
  for (const auto& state : states_below(root))
    if (state->group() && state->context()) state->group()->reshard();
}

void discard_gradients(const nn::AnyRef& root) {
  const auto root_state = std::dynamic_pointer_cast<FsdpState>(root.host().fsdp_hook);
  if (root_state && root_state->context()) return root_state->context()->discard_gradients();
  for (const auto& state : fsdp::states_below(root.module()))
    if (state->group()) state->group()->gradients().discard();
}

FsdpStats fsdp_stats(const nn::AnyRef& root) {
  FsdpStats stats;
  std::vector<fsdp::CommContext*> contexts;
  for (const auto& state : fsdp::states_below(root.module())) {
    if (state->group()) {
      ++stats.groups;
      stats.sharded_bytes += state->group()->sharded_bytes();
      stats.kept_gradient_bytes += state->group()->gradients().kept_bytes();
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
