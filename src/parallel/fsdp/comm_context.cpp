#include "parallel/fsdp/comm_context.h"

#include <algorithm>

#include <torch/csrc/autograd/engine.h>

#include "parallel/fsdp/param_group.h"
#include "titan/core/error.h"

namespace titan::fsdp {

CommContext::CommContext(at::Device device)
    : gather_stream(dist::Stream::create(device, dist::Priority::High)),
      reduce_stream(dist::Stream::create(device, dist::Priority::High)),
      pool(device) {}

void CommContext::count_gathered(int64_t change) {
  num_gathered += change;
  max_gathered = std::max(max_gathered, num_gathered);
}

void CommContext::begin_forward() {
  TITAN_CHECK(!in_backward_, "the root's forward was called inside its own backward");
  if (!visits_.empty()) {
    previous_order_.clear();
    for (Visit& visit : visits_) previous_order_.push_back(std::move(visit.group));
    visits_.clear();
  }
  ++iteration_;
}

int64_t CommContext::visit(const std::shared_ptr<ParamGroup>& group, bool with_backward) {
  visits_.push_back({group, with_backward, false});
  group->start_unshard();
  group->finish_unshard();
  prefetch_forward(visits_.size());
  return static_cast<int64_t>(visits_.size()) - 1;
}

// Only where this forward has followed the last one so far: a model that takes another path gathers without
// prefetching.
void CommContext::prefetch_forward(size_t next) {
  if (next >= previous_order_.size() || visits_.back().group != previous_order_[next - 1]) return;
  previous_order_[next]->start_unshard();
}

void CommContext::start_backward() {
  in_backward_ = true;
  next_gather_ = next_reduce_ = static_cast<int64_t>(visits_.size()) - 1;
  // The engine runs it when the backward that fired the first hook ends. Hooks lie outside of activation
  // checkpoints, so that is the outermost one.
  auto self = shared_from_this();
  torch::autograd::Engine::get_default_engine().queue_callback([self] { self->finish_backward(); });
}

void CommContext::issue_gather(int64_t visit) {
  Visit& due = visits_[visit];
  if (due.with_backward && due.group->backward_reads_parameters()) due.group->start_unshard();
}

void CommContext::pre_backward(int64_t iteration, int64_t visit) {
  TITAN_CHECK(iteration == iteration_, "backward through forward number ", iteration,
              " of a sharded model, but forward number ", iteration_,
              " has run since: run each backward before the next forward");
  if (!in_backward_) start_backward();
  while (next_gather_ >= visit) issue_gather(next_gather_--);
  ParamGroup& group = *visits_[visit].group;
  if (group.backward_reads_parameters()) {
    group.start_unshard();
    group.finish_unshard();
  }
  if (next_gather_ == visit - 1 && next_gather_ >= 0) issue_gather(next_gather_--);
}

void CommContext::post_backward(int64_t iteration, int64_t visit) {
  if (iteration != iteration_ || !in_backward_) return;
  visits_[visit].group->reshard();
  visits_[visit].ready = true;
  issue_ready_reductions();
}

void CommContext::issue_ready_reductions() {
  for (; next_reduce_ >= 0; --next_reduce_) {
    Visit& due = visits_[next_reduce_];
    if (!due.with_backward) continue;
    if (!due.ready) return;
    if (!due.group->start_reduce(last_micro_batch_)) continue;
    reducing_.push_back(due.group);
    advance_reductions(1);
  }
}

// A reduction is a chain: reduce-scatter, then perhaps an all-reduce, then the sum into the shard's gradient.
// Each older one takes its next link when a younger one has been issued, so that something is always on the
// wire while the backward computes.
void CommContext::advance_reductions(size_t num_young) {
  std::deque<std::shared_ptr<ParamGroup>> unfinished;
  for (size_t i = 0; i < reducing_.size(); ++i) {
    const bool young = i + num_young >= reducing_.size();
    if (young || !reducing_[i]->advance_reduce()) unfinished.push_back(std::move(reducing_[i]));
  }
  reducing_ = std::move(unfinished);
}

void CommContext::finish_backward() {
  for (Visit& visit : visits_) visit.ready = true;
  issue_ready_reductions();
  while (!reducing_.empty()) advance_reductions(0);
  for (Visit& visit : visits_) {
    visit.group->reshard();
    visit.with_backward = false;
  }
  const dist::Stream current = visits_.empty() ? dist::Stream() : visits_[0].group->compute_stream();
  current.wait(reduce_stream);  // the optimizer reads the gradients
  in_backward_ = false;
}

}  // namespace titan::fsdp
