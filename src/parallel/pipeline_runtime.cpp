#include "parallel/pipeline_runtime.h"

#include <algorithm>
#include <set>
#include <utility>

#include <torch/nn/module.h>

#include "parallel/fsdp/autograd_nodes.h"
#include "parallel/fsdp/fsdp_state.h"
#include "titan/core/error.h"

namespace titan::pipeline {

namespace {

constexpr const char* kPhase = "pp::transfer";

// Neighbouring stages on different ranks, both ways, in an order that all ranks share.
std::set<std::pair<int, int>> directions_of(const Schedule& schedule) {
  std::set<std::pair<int, int>> directions;
  for (size_t stage = 1; stage < schedule.rank_of_stage.size(); ++stage) {
    const int before = schedule.rank_of_stage[stage - 1], here = schedule.rank_of_stage[stage];
    if (before == here) continue;
    directions.insert({before, here});
    directions.insert({here, before});
  }
  return directions;
}

}  // namespace

dist::Work Link::send(const at::Tensor& tensor, const char* label) const {
  return group_->send(tensor, peer_, {kPhase, label});
}

dist::Work Link::receive(const at::Tensor& tensor, const char* label) const {
  return group_->receive(tensor, peer_, {kPhase, label});
}

dist::Work Link::send(const std::vector<at::Tensor>& tensors, const char* label) const {
  return group_->send(tensors, peer_, {kPhase, label});
}

dist::Work Link::receive(const std::vector<at::Tensor>& tensors, const char* label) const {
  return group_->receive(tensors, peer_, {kPhase, label});
}

void Links::connect(const Schedule& schedule) {
  TITAN_CHECK(schedule.num_ranks() == pp_.size(), "a schedule of ", schedule.num_ranks(),
              " pipeline ranks on a mesh of ", pp_.size());
  for (const auto& [from, to] : directions_of(schedule)) {
    if ((from != pp_.rank() && to != pp_.rank()) || links_.contains({from, to})) continue;
    std::vector<int> ranks = {pp_.ranks()[static_cast<size_t>(from)], pp_.ranks()[static_cast<size_t>(to)]};
    std::sort(ranks.begin(), ranks.end());
    const char* purpose = from < to ? "pipeline.down" : "pipeline.up";
    auto group = pp_.world().group(ranks, str("pp.", from, "-", to), purpose);
    const int peer = 1 - group->rank();
    links_.emplace(std::pair(from, to), Link(std::move(group), peer));
  }
}

void Links::close() const {
  for (const auto& [ends, link] : links_) link.close();
}

}  // namespace titan::pipeline

namespace titan {

DelayedGradients::DelayedGradients() : queue_(std::make_unique<fsdp::DelayedQueue>()) {}
DelayedGradients::DelayedGradients(DelayedGradients&&) noexcept = default;
DelayedGradients& DelayedGradients::operator=(DelayedGradients&&) noexcept = default;
DelayedGradients::~DelayedGradients() = default;
void DelayedGradients::compute() { queue_->compute(); }
size_t DelayedGradients::size() const { return queue_->size(); }
int64_t DelayedGradients::bytes() const { return queue_->bytes(); }

namespace {

// A state without a context becomes a root; a state below a root has the root's context.
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
