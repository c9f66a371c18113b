#include "parallel/fsdp/fsdp_state.h"

#include <algorithm>

#include <torch/nn/module.h>

#include "parallel/fsdp/autograd_nodes.h"
#include "titan/core/error.h"
#include "titan/core/log.h"

namespace titan::fsdp {

namespace {
constexpr double kMiB = 1024.0 * 1024.0;
}

std::vector<std::shared_ptr<FsdpState>> states_below(torch::nn::Module& root) {
  std::vector<std::shared_ptr<FsdpState>> states;
  const auto visit = [&](torch::nn::Module& module) {
    const auto* host = dynamic_cast<nn::HookHost*>(&module);
    auto state = host ? std::dynamic_pointer_cast<FsdpState>(host->fsdp_hook) : nullptr;
    if (state && std::find(states.begin(), states.end(), state) == states.end())
      states.push_back(std::move(state));
  };
  visit(root);
  for (const auto& module : root.modules(/*include_self=*/false)) visit(*module);
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
    if (state->group_ && !state->group_->param(0).compute.is_meta())  // a dry run keeps nothing
      bytes += state->group_->kept_gradient_bytes();
  if (bytes > 0)
    log::info_rank0(str("whole gradients stay between micro-batches: ", static_cast<double>(bytes) / kMiB,
                        " MiB on each rank"));
}

void FsdpState::set_last_micro_batch(bool last) {
  last_micro_batch_ = last;
  if (context_) context_->set_last_micro_batch(last);
}

void FsdpState::cast(const nn::TensorRefs& tensors, at::ScalarType dtype) const {
  for (at::Tensor* tensor : tensors)
    if (tensor->is_floating_point() && tensor->scalar_type() != dtype) *tensor = tensor->to(dtype);
}

void FsdpState::pre_forward(nn::HookHost& host, const nn::TensorRefs& inputs) {
  if (!context_) become_root(host);
  if (context_->scheduled()) return pre_scheduled_forward(inputs);
  if (is_root_) context_->begin_forward();
  if (options_.cast_forward_inputs && options_.param_dtype) cast(inputs, *options_.param_dtype);
  // Modules of a list that an earlier forward left out, or never came to, don't count for this one.
  if (std::exchange(forward_, context_->num_forwards()) != context_->num_forwards()) modules_entered_ = 0;
  if (!group_ || modules_entered_++ > 0) return;
  visit_ = context_->visit(group_);
  if (visit_ < 0) return;
  // The hooks live in the graph, which lives no longer than the context's owner, the model; a weak pointer
  // all the same.
  const bool told = call_after_backward(
      inputs, [context = std::weak_ptr(context_), iteration = context_->iteration(), visit = visit_] {
        if (const auto alive = context.lock()) alive->post_backward(iteration, visit);
      });
  if (!told) context_->reduce_at_end(visit_);
}

// Nothing is hung into the graph: it may be walked whenever the schedule says.
void FsdpState::pre_scheduled_forward(const nn::TensorRefs& inputs) {
  if (options_.cast_forward_inputs && options_.param_dtype) cast(inputs, *options_.param_dtype);
  if (!group_) return;
  group_->finish_unshard();
  TITAN_CHECK(group_->gathered(), "'", group_->name(),
              "' was called while its parameters are freed: its stage has to be unsharded first");
  group_->remember_stream();
}

void FsdpState::post_forward(nn::HookHost& /*host*/, const nn::TensorRefs& outputs) {
  if (options_.output_dtype) cast(outputs, *options_.output_dtype);
  if (context_->scheduled()) return;
  if (group_) {
    expect_backward(outputs);
    if (modules_entered_ == modules_.size()) {
      modules_entered_ = 0;
      group_->after_forward();
    }
  }
  if (is_root_) context_->end_forward();
}

void FsdpState::expect_backward(const nn::TensorRefs& outputs) {
  if (visit_ < 0) return;
  const bool expected = call_before_backward(
      outputs, [context = std::weak_ptr(context_), iteration = context_->iteration(), visit = visit_] {
        if (const auto alive = context.lock()) alive->pre_backward(iteration, visit);
      });
  if (expected) context_->expect_backward(visit_);
}

}  // namespace titan::fsdp
