#include "parallel/pipeline_runtime.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <set>
#include <string>
#include <thread>
#include <unordered_set>
#include <vector>

#include <ATen/ops/zeros.h>
#include <torch/nn/module.h>

#include "dist/device_backend.h"
#include "parallel/fsdp/fsdp_state.h"
#include "titan/core/error.h"
#include "titan/dist/world.h"

namespace titan::pipeline {

namespace {

// Pairs of ranks with neighboring stages, in both directions, in the same order on all ranks.
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

// A schedule posts receives ahead of the sends that its peer waits for.
void check_launches(const dist::World& world) {
  const dist::DeviceBackend* const devices = dist::device_backend();
  if (world.backend() == "nccl" && devices && devices->launches_block())
    throw ConfigError(
        "CUDA_LAUNCH_BLOCKING is set: a pipeline over NCCL would hang, because each receive would block its "
        "host until the message comes. Unset it, or set comm.backend = \"gloo\"");
  if (world.backend() == "nccl" && devices && devices->num_queues() < dist::DeviceBackend::kQueues)
    throw ConfigError(str("CUDA_DEVICE_MAX_CONNECTIONS is ", devices->num_queues(),
                          ": a pipeline over NCCL could hang, because a stream's receive also holds up the "
                          "streams that share its queue "
                          "of the device. Unset it, because LibTitan sets ",
                          dist::DeviceBackend::kQueues, ", or set comm.backend = \"gloo\""));
}

// NCCL connects two ranks when they first exchange a message, and blocks both hosts until both have come. So
// they do it here, where all ranks make their links in one order: in a step, one might first wait for others.
void make_contact(dist::Group& group, int peer, bool sends, at::Device device) {
  const at::Tensor message = at::zeros({1}, device);
  const dist::Label label{"pp::first_message"};
  (sends ? group.send(message, peer, label) : group.receive(message, peer, label)).wait();
}

constexpr dist::Label kProbe{"pp::probe"};

// A receive that waits for its sender holds up the streams that share its queue of the device, and only the driver knows which these are. So
// the stream that computes is tested beside a receive on each link from another rank. Others, such as those of gathers, aren't.
void compute_while_receiving(const std::vector<const Link*>& incoming,
                             const std::vector<const Link*>& outgoing, const dist::World& world,
                             const std::function<void()>& close) {
  const at::Device device = world.device();
  constexpr std::chrono::seconds limit{10};
  const size_t num_messages = incoming.size() + outgoing.size();
  const std::vector<at::Tensor> numbers =
      at::zeros({static_cast<int64_t>(num_messages) + 1}, device).split(1);
  const auto compute = [&] { numbers.back().add_(1); };
  compute();  // loads the kernel, for which the host may wait until the device has nothing to do
  dist::Stream::current(device).synchronize();
  std::vector<dist::Work> messages;
  for (size_t i = 0; i < incoming.size(); ++i)
    messages.push_back(incoming[i]->group->receive(numbers[i], incoming[i]->peer, kProbe));
  compute();
  const dist::Event computed = dist::Stream::current(device).record();
  for (const auto end = std::chrono::steady_clock::now() + limit; !computed.done();
       std::this_thread::sleep_for(std::chrono::milliseconds(1)))
    if (std::chrono::steady_clock::now() > end) {
      const std::string why =
          str("the device doesn't compute while it waits for a message: within ", limit.count(),
              " s, nothing was computed beside ", incoming.size(),
              " receives. A pipeline over NCCL would hang. Set comm.backend = \"gloo\", or "
              "parallelism.pipeline_parallel_degree = 1");
      dist::tell_failure(world, why, close);
      throw Error(why);
    }
  for (size_t i = 0; i < outgoing.size(); ++i)
    messages.push_back(outgoing[i]->group->send(numbers[incoming.size() + i], outgoing[i]->peer, kProbe));
  for (dist::Work& message : messages) message.wait();
}

}  // namespace

void Links::connect(const Schedule& schedule) {
  TITAN_CHECK(schedule.num_ranks() == pp_.size(), "a schedule of ", schedule.num_ranks(),
              " pipeline ranks on a mesh of ", pp_.size());
  if (pp_.size() > 1) check_launches(pp_.world());
  std::vector<const Link*> incoming, outgoing;
  for (const auto& [from, to] : directions_of(schedule)) {
    if ((from != pp_.rank() && to != pp_.rank()) || links_.contains({from, to})) continue;
    std::vector<int> ranks = {pp_.ranks()[static_cast<size_t>(from)], pp_.ranks()[static_cast<size_t>(to)]};
    std::sort(ranks.begin(), ranks.end());
    const std::string purpose = str(dist::kLongReceives, from < to ? "down" : "up");
    auto group = pp_.world().group(ranks, str("pp.", from, "-", to), purpose);
    const int peer = 1 - group->rank();
    make_contact(*group, peer, /*sends=*/from == pp_.rank(), pp_.world().device());
    const auto link = links_.emplace(std::pair(from, to), Link{std::move(group), peer}).first;
    (from == pp_.rank() ? outgoing : incoming).push_back(&link->second);
  }
  if ((incoming.empty() && outgoing.empty()) || pp_.world().backend() != "nccl") return;
  compute_while_receiving(incoming, outgoing, pp_.world(), [this] { close(); });
}

void Links::close() const {
  for (const auto& [ends, link] : links_) link.group->close();
}

}  // namespace titan::pipeline

namespace titan {

// Each entry is freed once computed, so memory decreases meanwhile.
void DelayedGradients::compute(const std::function<void(fsdp::ParamGroup&)>& added) {
  for (Entry& entry : entries_) {
    const Entry due = std::exchange(entry, {});
    std::visit([&due](const auto& gradient) { due.group->take_grad(due.slot, gradient); }, due.gradient);
    if (added) added(*due.group);
  }
  entries_.clear();
}

std::map<fsdp::ParamGroup*, size_t> DelayedGradients::count_by_group() const {
  std::map<fsdp::ParamGroup*, size_t> counts;
  for (const Entry& entry : entries_) ++counts[entry.group.get()];
  return counts;
}

int64_t DelayedGradients::bytes() const {
  std::unordered_set<const void*> seen;
  int64_t total = 0;
  const auto count = [&](const at::Tensor& tensor) {
    if (tensor.defined() && seen.insert(tensor.storage().unsafeGetStorageImpl()).second)
      total += static_cast<int64_t>(tensor.storage().nbytes());
  };
  for (const Entry& entry : entries_) {
    if (const auto* due = std::get_if<ops::DueGradient>(&entry.gradient)) {
      for (const at::Tensor& tensor : due->reads) count(tensor);
      continue;
    }
    const auto& product = std::get<ops::WeightGrad>(entry.gradient);
    for (const ops::Operand* operand : {&product.grad_output_NO, &product.input_NI})
      for (const at::Tensor* tensor :
           {&operand->values, &operand->along_rows.data, &operand->down_columns.data})
        count(*tensor);
  }
  return total;
}

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

void ScheduledSharding::set_last_forward(bool last) {
  for (const auto& context : contexts_) context->set_last_forward(last);
}

void ScheduledSharding::end_last_backward() {
  for (const auto& context : contexts_) context->end_last_backward();
}

void ScheduledSharding::compute_last(DelayedGradients& delayed) {
  std::map<fsdp::ParamGroup*, size_t> rest = delayed.count_by_group();
  for (const auto& context : contexts_)
    for (fsdp::ParamGroup* group : context->groups())
      if (!rest.contains(group)) group->gradients_complete();
  delayed.compute([&](fsdp::ParamGroup& group) {
    if (--rest[&group] == 0) group.gradients_complete();
  });
}

void ScheduledSharding::finish() {
  for (const auto& context : contexts_) context->finish_reduce();
}

void ScheduledSharding::discard() {
  stop_delaying();
  for (const auto& context : contexts_) context->abandon_step();
}

void ScheduledSharding::delay_weight_gradients(DelayedGradients& target) {
  for (const auto& context : contexts_) context->set_delayed(&target);
}

void ScheduledSharding::stop_delaying() {
  for (const auto& context : contexts_) context->set_delayed(nullptr);
}

}  // namespace titan
