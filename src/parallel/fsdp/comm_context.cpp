#include "parallel/fsdp/comm_context.h"

#include <algorithm>
#include <exception>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <c10/core/Storage.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include "dist/stream.h"
#include "dist/stream_clock.h"
#include "parallel/fsdp/param_group.h"
#include "tensor/memory.h"
#include "titan/core/error.h"

namespace titan::fsdp {

namespace {

// The smallest part of a buffer that a request may use, so that a norm doesn't take a block's buffer.
constexpr double kSmallestUse = 0.8;

// More than the micro-batches of a step, of which only the last one may need some buffers.
constexpr int64_t kMostIdleForwards = 100;

}  // namespace

BufferPool::BufferPool(at::Device device) : device_(device), home_(dist::Stream::current(device)) {
  // Without the plugin, a GPU has LibTorch's allocator all the same.
  const dist::DeviceBackend* backend = dist::device_backend();
  if (device.is_cuda() && (!backend || backend->caches_memory()))
    idle_.emplace([this] { return take_idle(); });
}

BufferPool::~BufferPool() {
  idle_.reset();
  const bool unwinds = std::uncaught_exceptions() > 0;
  const auto is_done = [unwinds](const dist::Event& event) {
    try {
      if (!unwinds) event.synchronize();
      return event.done();
    } catch (const std::exception&) {  // the device failed
      return false;
    }
  };
  // While an error unwinds, streams may wait for a peer that is lost. Memory in use is given up, then.
  for (Free& free : free_)
    if (!is_done(free.used)) static_cast<void>(free.bytes.unsafeReleaseTensorImpl());
}

dist::RegisteredMemory& BufferPool::use_registered() {
  if (registered_) return *registered_;
  dist::DeviceBackend* backend = device_.is_cuda() ? dist::device_backend() : nullptr;
  if (backend) registered_ = backend->make_registered_memory();
  TITAN_CHECK(registered_, "fully_shard: register_buffers needs GPUs and NCCL, and the parameters are on ",
              device_);
  idle_.reset();
  return *registered_;
}

at::Tensor BufferPool::new_bytes(int64_t bytes) const {
  return registered_ ? registered_->empty(bytes)
                     : resident_empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device_));
}

at::Tensor BufferPool::take_fitting(int64_t bytes, const dist::Stream& user) {
  const std::lock_guard lock(mutex_);
  auto best = free_.end();
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    const int64_t size = it->bytes.numel();
    if (size < bytes || static_cast<double>(bytes) < kSmallestUse * static_cast<double>(size)) continue;
    if (best == free_.end() || size < best->bytes.numel()) best = it;
  }
  if (best == free_.end()) return {};
  user.wait(best->used);
  at::Tensor buffer = std::move(best->bytes);
  free_.erase(best);
  return buffer;
}

// Events order every later use, so the allocator needn't know about other streams.
at::Tensor BufferPool::new_buffer(int64_t bytes, const dist::Stream& user) {
  TITAN_CHECK(!registered_ || !user.is_recorded(),
              "registered communication buffers can't be allocated while work is recorded");
  TITAN_INTERNAL_ASSERT(home_.is_recorded() == user.is_recorded(), "a recording on another stream");
  at::Tensor buffer;
  {
    const dist::StreamGuard at_home(home_);
    buffer = new_bytes(bytes);
  }
  user.wait(home_);  // its work may still use the memory
  ++num_allocations_;
  return buffer;
}

at::Tensor BufferPool::acquire(int64_t numel, at::ScalarType dtype, const dist::Stream& user) {
  const int64_t bytes = std::max<int64_t>(numel, 1) * static_cast<int64_t>(c10::elementSize(dtype));
  at::Tensor buffer = take_fitting(bytes, user);
  if (!buffer.defined()) buffer = new_buffer(bytes, user);
  at::Tensor typed = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(buffer.storage()), buffer.key_set(), c10::scalarTypeToTypeMeta(dtype));
  typed.unsafeGetTensorImpl()->set_sizes_contiguous({numel});
  return typed;
}

void BufferPool::release(at::Tensor buffer, const dist::Stream& last_user) {
  if (idle_ && last_user == home_) return;  // to the allocator
  const auto bytes = static_cast<int64_t>(buffer.storage().nbytes());
  at::Tensor whole = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(buffer.storage()), buffer.key_set(), c10::scalarTypeToTypeMeta(at::kByte));
  whole.unsafeGetTensorImpl()->set_sizes_contiguous({bytes});
  dist::Event used = last_user.record();
  const std::lock_guard lock(mutex_);
  free_.push_back({std::move(whole), std::move(used), num_forwards_});
}

std::vector<at::Tensor> BufferPool::take_if(const std::function<bool(const Free&)>& wanted) {
  const std::lock_guard lock(mutex_);
  const auto taken =
      std::stable_partition(free_.begin(), free_.end(), [&](const Free& free) { return !wanted(free); });
  std::vector<at::Tensor> buffers;
  for (auto free = taken; free != free_.end(); ++free) buffers.push_back(std::move(free->bytes));
  free_.erase(taken, free_.end());
  return buffers;
}

void BufferPool::begin_forward() {
  ++num_forwards_;
  if (registered_) return;
  take_if([this](const Free& free) {
    return num_forwards_ - free.forward > kMostIdleForwards && free.used.done();
  });
}

void BufferPool::hand_over() {
  home_.wait(dist::Stream::current(device_));
  if (!idle_) return;
  take_if([this](const Free& free) {
    if (free.used.is_recorded()) return false;
    home_.wait(free.used);
    return true;
  });
}

std::vector<at::Tensor> BufferPool::take_idle() {
  return take_if([](const Free& free) {
    if (free.used.is_recorded()) return false;
    free.used.synchronize();
    return true;
  });
}

void leave_stream(dist::Work& work, const dist::Stream& stream, at::ArrayRef<at::Tensor> buffers) {
  if (!stream.on_device()) return;
  try {
    const dist::StreamGuard guard(stream);
    work.wait();
  } catch (const std::exception&) {  // it failed before, and was reported then
  }
  for (const at::Tensor& buffer : buffers) {
    if (!buffer.defined() || buffer.is_cpu()) continue;
    stream.keep_alive(buffer);
    dist::Stream::current(buffer.device()).keep_alive(buffer);
  }
}

CommContext::CommContext(at::Device device)
    : gather_stream(dist::Stream::create(device, dist::Priority::High)),
      reduce_stream(dist::Stream::create(device, dist::Priority::High)),
      pool(device) {
  dist::name_stream("fsdp gather", gather_stream);
  dist::name_stream("fsdp reduce", reduce_stream);
}

CommContext::~CommContext() {
  for (ParamGroup* group : groups_) group->leave();
  if (!pool.is_registered() || std::uncaught_exceptions() > 0) return;
  // No call may use memory that is deregistered.
  try {
    gather_stream.synchronize();
    reduce_stream.synchronize();
  } catch (const std::exception&) {
    // A device that has failed. Whoever uses it next meets the same error.
  }
}

void CommContext::count_gathered(int64_t change) {
  num_gathered += change;
  max_gathered = std::max(max_gathered, num_gathered);
}

void CommContext::remove_group(ParamGroup* group) {
  for (auto* list : {&groups_, &order_, &previous_order_}) std::erase(*list, group);
  std::erase(reducing_, group);
}

void CommContext::begin_forward() {
  if (in_backward_) {
    TITAN_CHECK(torch::autograd::get_current_graph_task_id() < 0,
                "the root's forward was called inside its own backward");
    abandon_backward();
  }
  cancel_prefetches();  // left over if the last forward threw
  pool.begin_forward();
  previous_order_.swap(order_);
  order_.clear();
  ++num_forwards_;
  if (!at::GradMode::is_enabled()) return;  // may run between a forward and its backward
  visits_.clear();
  ends_.clear();
  ++iteration_;
}

void CommContext::end_forward() {
  cancel_prefetches();
  if (!at::GradMode::is_enabled()) wait_for_copies();
}

// The host may write shards and read gradients from now on; copies of them may still be running.
void CommContext::wait_for_copies() const {
  if (!host_shards_) return;
  gather_stream.synchronize();
  reduce_stream.synchronize();
}

void CommContext::cancel_prefetches() {
  for (ParamGroup* group : groups_) group->cancel_unshard();
}

int64_t CommContext::visit(const std::shared_ptr<ParamGroup>& group) {
  TITAN_CHECK(!in_backward_, "the forward of '", group->name(),
              "' was called inside a backward: wrap the module that is recomputed (activation "
              "checkpointing) in fully_shard, not modules inside it");
  order_.push_back(group.get());
  group->remember_stream();
  group->start_unshard();
  group->finish_unshard();
  prefetch_forward();
  if (!at::GradMode::is_enabled()) return -1;
  visits_.push_back({group});
  return static_cast<int64_t>(visits_.size()) - 1;
}

// Prefetches only while this forward follows the last one's order. A model that takes another path gathers
// without prefetching, unless its groups have lists.
void CommContext::prefetch_forward() {
  const ParamGroup& now = *order_.back();
  if (const auto& list = now.forward_prefetch()) {
    for (const auto& listed : *list)
      if (const auto group = listed.lock()) checked(now, *group).start_unshard();
    return;
  }
  const size_t begin = order_.size();
  if (begin > previous_order_.size() || &now != previous_order_[begin - 1]) return;
  const size_t end = std::min(begin + static_cast<size_t>(now.options().prefetch), previous_order_.size());
  for (size_t next = begin; next < end; ++next) previous_order_[next]->start_unshard();
}

ParamGroup& CommContext::checked(const ParamGroup& now, ParamGroup& listed) const {
  TITAN_CHECK(listed.belongs_to(*this), "the prefetch list of '", now.name(),
              "' has a module that isn't below the same sharded root");
  return listed;
}

// Whether the group of a later visit runs in the backward before that, from the visit of `turn` on: then it is gathered,
// and freed, once more, and no rank gathers ahead past it, whichever of its visits' backwards it reaches.
bool CommContext::runs_before(int64_t later, int64_t turn) const {
  const auto group_at = [this](int64_t end) {
    return visits_[static_cast<size_t>(ends_[static_cast<size_t>(end)])].group.get();
  };
  for (int64_t end = later + 1; end <= turn; ++end)
    if (group_at(end) == group_at(later)) return true;
  return false;
}

// The index in ends_ of the last visit that the backward gathers ahead while that of `turn` computes.
int64_t CommContext::prefetched_by(int64_t turn) const {
  const ParamGroup& now = *visits_[static_cast<size_t>(ends_[static_cast<size_t>(turn)])].group;
  const auto& list = now.backward_prefetch();
  if (!list) return turn - now.options().prefetch;
  int64_t last = turn;
  for (const auto& listed : *list) {
    const auto group = listed.lock();
    if (!group) continue;
    checked(now, *group);
    int64_t next = turn - 1;
    while (next >= 0 && visits_[static_cast<size_t>(ends_[static_cast<size_t>(next)])].group != group) --next;
    if (next >= 0) last = std::min(last, next);
  }
  return last;
}

void CommContext::expect_backward(int64_t visit) {
  Visit& ending = visits_[static_cast<size_t>(visit)];
  if (std::exchange(ending.with_backward, true)) std::erase(ends_, visit);  // the last module's end counts
  ends_.push_back(visit);
}

void CommContext::start_backward() {
  in_backward_ = true;
  next_gather_ = static_cast<int64_t>(ends_.size()) - 1;
  next_reduce_ = static_cast<int64_t>(visits_.size()) - 1;
  reached_ = static_cast<int64_t>(ends_.size());
  for (size_t end = 0; end < ends_.size(); ++end)
    visits_[static_cast<size_t>(ends_[end])].end = static_cast<int64_t>(end);
  // The engine runs the callback when the backward that fired the first hook ends. Hooks are outside of
  // activation checkpoints, so that is the outermost backward.
  // On a GPU, the engine's threads may let go of callbacks after the backward has returned: those must not
  // keep a model's memory.
  torch::autograd::Engine::get_default_engine().queue_callback([context = weak_from_this()] {
    if (const auto self = context.lock()) self->finish_backward();
  });
}

// After an exception in the backward, the engine runs no callbacks.
void CommContext::abandon_backward() {
  in_backward_ = false;
  reducing_.clear();
  forget_reductions();
  discard_gradients();  // waits for copies, which may still write to gradients that are zeroed next
  for (ParamGroup* group : groups_) {
    group->cancel_unshard();
    group->reshard();
  }
}

void CommContext::discard_gradients() {
  for (ParamGroup* group : groups_) group->gradients().discard();
  wait_for_copies();
}

void CommContext::issue_gather() {
  ParamGroup& group = *visits_[static_cast<size_t>(ends_[static_cast<size_t>(next_gather_--)])].group;
  if (group.backward_reads_parameters()) group.start_unshard();
}

// Starts the gathers that are due when the backward reaches the visit of `turn`, and those ahead of it.
void CommContext::gather_ahead(int64_t turn) {
  while (next_gather_ >= turn) issue_gather();
  const int64_t last = std::max<int64_t>(prefetched_by(turn), 0);
  while (next_gather_ >= last && !runs_before(next_gather_, turn)) issue_gather();
}

void CommContext::pre_backward(int64_t iteration, int64_t visit) {
  TITAN_CHECK(iteration == iteration_, "backward through forward number ", iteration,
              " of a sharded model, but forward number ", iteration_,
              " has run since: run each backward before the next forward");
  if (!in_backward_) start_backward();
  const Visit& now = visits_[static_cast<size_t>(visit)];
  TITAN_CHECK(!now.skipped, "the backward of '", now.group->name(),
              "' came after that of a module that ran before it in the forward, so its gradients were "
              "reduced already: "
              "a sharded model's backward has to run its modules in the reverse of their forwards' order");
  skip_to(now.end, visit);
  reached_ = std::min(reached_, now.end);
  ParamGroup& group = *now.group;
  while (next_gather_ >= now.end) issue_gather();
  if (group.backward_reads_parameters()) {
    group.start_unshard();
    group.finish_unshard();
  }
  gather_ahead(now.end);
}

// Before this rank waits for a gather: visits that ran after `visit` and weren't reached never will be, since the engine
// runs the newest operations first. Those that began before it enclose it, and may still collect gradients.
// Another rank may have reached them: this one gathers and reduces for them in the same order.
void CommContext::skip_to(int64_t turn, int64_t visit) {
  while (reached_ > turn + 1) {
    gather_ahead(--reached_);
    const int64_t passed = ends_[static_cast<size_t>(reached_)];
    if (passed < visit) continue;
    Visit& skipped = visits_[static_cast<size_t>(passed)];
    skipped.skipped = skipped.ready = true;
    skipped.group->cancel_unshard();
    issue_ready_reductions();
  }
}

void CommContext::post_backward(int64_t iteration, int64_t visit) {
  if (iteration != iteration_ || !in_backward_) return;
  Visit& done = visits_[static_cast<size_t>(visit)];
  done.group->reshard();
  done.ready = true;
  issue_ready_reductions();
}

void CommContext::issue_ready_reductions() {
  for (; next_reduce_ >= 0; --next_reduce_) {
    Visit& due = visits_[static_cast<size_t>(next_reduce_)];
    if (!due.with_backward || due.at_end) continue;
    if (!due.ready) return;
    issue_reduction(*due.group);
  }
}

void CommContext::issue_reduction(ParamGroup& group) {
  if (!group.gradients().start_reduce(last_micro_batch_)) return;
  reducing_.push_back(&group);
  advance_reductions(1);
}

// Reduces the visits outside the chain and, in the last micro-batch, groups that took part only in an earlier
// one.
void CommContext::issue_last_reductions() {
  for (auto visit = visits_.rbegin(); visit != visits_.rend(); ++visit)
    if (visit->with_backward && visit->at_end) issue_reduction(*visit->group);
  if (!last_micro_batch_) return;
  for (ParamGroup* group : groups_)
    if (group->gradients().owes_reduction()) issue_reduction(*group);
}

// A reduction is a chain: reduce-scatter, then perhaps an all-reduce, then the sum into the shard's gradient.
// An older reduction continues when a newer one has been issued, so that communication always runs while the
// backward computes.
void CommContext::advance_reductions(size_t num_young) {
  std::deque<ParamGroup*> unfinished;
  for (size_t i = 0; i < reducing_.size(); ++i) {
    const bool young = i + num_young >= reducing_.size();
    if (young || !reducing_[i]->gradients().advance_reduce()) unfinished.push_back(reducing_[i]);
  }
  reducing_ = std::move(unfinished);
}

void CommContext::finish_backward() {
  skip_to(-1, 0);
  for (Visit& visit : visits_) visit.ready = true;
  issue_ready_reductions();
  issue_last_reductions();
  while (!reducing_.empty()) advance_reductions(0);
  for (Visit& visit : visits_) {
    visit.group->cancel_unshard();
    visit.group->reshard();
    visit.ready = visit.skipped = false;  // a retained graph may run its backward again
  }
  hand_over();
  in_backward_ = false;
}

// Before the optimizer reads the gradients and writes the shards.
void CommContext::hand_over() {
  if (groups_.empty()) return;
  {
    const dist::PeerWait waiting("reduce_scatter");
    const dist::Stream current = groups_.front()->compute_stream();
    current.wait(reduce_stream);
    current.wait(gather_stream);
    pool.hand_over();
  }
  wait_for_copies();
}

void CommContext::become_scheduled() {
  TITAN_CHECK(!in_backward_, "a schedule can't take over in the middle of a backward");
  cancel_prefetches();
  visits_.clear();
  ends_.clear();
  order_.clear();
  previous_order_.clear();
  scheduled_ = true;
}

void CommContext::unshard() {
  for (ParamGroup* group : groups_) group->start_unshard();
}

void CommContext::wait_unsharded() {
  for (ParamGroup* group : groups_) group->finish_unshard();
}

void CommContext::reshard() {
  for (ParamGroup* group : groups_) group->reshard();
}

// Last groups first, as in a backward: the same order on all ranks, whenever each group's gradients are complete. Nothing
// waits before finish_reduce().
void CommContext::reduce_next() {
  ParamGroup& group = *groups_[groups_.size() - ++num_reduced_];
  if (group.gradients().start_reduce(/*last_micro_batch=*/true)) reducing_.push_back(&group);
}

void CommContext::complete(const ParamGroup& group) {
  complete_.insert(&group);
  while (num_reduced_ < groups_.size() && complete_.contains(groups_[groups_.size() - 1 - num_reduced_]))
    reduce_next();
}

void CommContext::set_last_forward(bool last) {
  last_forward_ = last;
  if (last) ++num_forwards_;
}

void CommContext::end_last_backward() {
  for (const auto& [group, runs] : unfinished_) complete(*group);
}

void CommContext::end_of_backward(const ParamGroup& group) {
  if (--unfinished_.at(&group) == 0) complete(group);
}

void CommContext::reduce() {
  while (num_reduced_ < groups_.size()) reduce_next();
  forget_reductions();
}

void CommContext::forget_reductions() {
  num_reduced_ = 0;
  unfinished_.clear();
  complete_.clear();
  last_forward_ = false;
}

void CommContext::finish_reduce() {
  while (!reducing_.empty()) advance_reductions(0);
  reshard();
  hand_over();
}

}  // namespace titan::fsdp
