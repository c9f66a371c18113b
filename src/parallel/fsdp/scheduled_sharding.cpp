#include "titan/parallel/scheduled_sharding.h"

#include <algorithm>
#include <utility>

#include <torch/nn/module.h>

#include "parallel/fsdp/delayed_queue.h"
#include "parallel/fsdp/fsdp_state.h"

namespace titan {

DelayedGradients::DelayedGradients() : queue_(std::make_unique<fsdp::DelayedQueue>()) {}
DelayedGradients::DelayedGradients(DelayedGradients&&) noexcept = default;
DelayedGradients& DelayedGradients::operator=(DelayedGradients&&) noexcept = default;
DelayedGradients::~DelayedGradients() = default;
void DelayedGradients::compute() { queue_->compute(); }
size_t DelayedGradients::size() const { return queue_->size(); }
int64_t DelayedGradients::bytes() const { return queue_->bytes(); }

namespace {

// Whoever has no context by now becomes a root; a state below one has it from its root.
std::vector<std::shared_ptr<fsdp::CommContext>> contexts_below(const nn::AnyRef& root) {
  std::vector<std::shared_ptr<fsdp::CommContext>> contexts;
  for (const auto& state : fsdp::states_below(root.module())) {
    if (!state->context()) state->become_root(state->first_module());
    if (std::find(contexts.begin(), contexts.end(), state->context()) == contexts.end())
      contexts.push_back(state->context());
  }
  return contexts;
}

}  // namespace

ScheduledSharding::ScheduledSharding(nn::AnyRef root)
    : root_(std::move(root)), contexts_(contexts_below(root_)) {
  for (const auto& context : contexts_) context->become_scheduled();
}
ScheduledSharding::~ScheduledSharding() = default;
ScheduledSharding::ScheduledSharding(ScheduledSharding&&) noexcept = default;

void ScheduledSharding::unshard() {
  for (const auto& context : contexts_) context->unshard();
}

void ScheduledSharding::wait() {
  for (const auto& context : contexts_) context->wait_unsharded();
}

void ScheduledSharding::reshard() {
  for (const auto& context : contexts_) context->reshard();
}

void ScheduledSharding::reduce() {
  for (const auto& context : contexts_) context->reduce();
}

void ScheduledSharding::finish() {
  for (const auto& context : contexts_) context->finish_reduce();
}

void ScheduledSharding::discard() {
  stop_delaying();
  for (const auto& context : contexts_) context->abandon_step();
}

void ScheduledSharding::delay_weight_gradients(DelayedGradients& target) {
  for (const auto& context : contexts_) context->set_delayed(target.queue_.get());
}

void ScheduledSharding::stop_delaying() {
  for (const auto& context : contexts_) context->set_delayed(nullptr);
}

}  // namespace titan
