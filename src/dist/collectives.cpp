// Collectives over a c10d backend. A call is checked. In a group of one it is done at once; otherwise it is
// recorded in the ring and passed to the backend, and its Work remembers enough to name the call if it fails.

#include "titan/dist/collectives.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <mutex>
#include <unordered_map>

#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>

#include "core/threads.h"
#include "dist/backends.h"
#include "dist/device_backend.h"
#include "dist/flight_record.h"
#include "dist/stream_clock.h"
#include "dist/work_graph.h"
#include "titan/core/error.h"

namespace titan::dist {

/// Buffers of a group for calls that it composes itself. A released one is reused for the same size and
/// dtype. Thread-safe.
class StagingPool {
 public:
  at::Tensor acquire(int64_t numel, at::ScalarType dtype) {
    std::lock_guard lock(mutex_);
    const auto fits = [&](const at::Tensor& t) { return t.numel() == numel && t.scalar_type() == dtype; };
    const auto found = std::find_if(free_.begin(), free_.end(), fits);
    if (found == free_.end()) return at::empty({numel}, dtype);
    at::Tensor buffer = std::move(*found);
    free_.erase(found);
    return buffer;
  }

  void release(at::Tensor buffer) {
    constexpr size_t most = 4;  // more than what overlaps in one group; older sizes make room
    std::lock_guard lock(mutex_);
    if (free_.size() == most) free_.erase(free_.begin());
    free_.push_back(std::move(buffer));
  }

 private:
  std::mutex mutex_;
  std::vector<at::Tensor> free_;
};

namespace {

c10d::ReduceOp to_c10d(ReduceOp op) {
  if (op == ReduceOp::Sum) return c10d::ReduceOp::SUM;
  return op == ReduceOp::Max ? c10d::ReduceOp::MAX : c10d::ReduceOp::MIN;
}

void copy_into(const at::Tensor& out, const at::Tensor& in) {
  if (out.is_same(in) || (out.has_storage() && out.is_alias_of(in) && out.data_ptr() == in.data_ptr()))
    return;
  at::NoGradGuard no_grad;
  // It has its own version counter: like a backend, this writes into memory without telling autograd.
  at::Tensor target = out.variable_data();
  target.view(-1).copy_(in.reshape(-1), /*non_blocking=*/true);
}

/// A trace range for a collective's launch, or the wait for it, on the CPU: "all_gather fsdp::all_gather
/// layers.3", with bytes and group. NCCL records the device's part.
class CollectiveRange {
 public:
  /// `prefix` comes before the name.
  CollectiveRange(const char* prefix, const CallRecord& call, int group_size) {
    auto recorders = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
    if (!recorders.has_value()) return;
    record_.emplace(std::move(*recorders));
    const std::unordered_map<std::string, c10::IValue> details = {
        {"bytes", call.bytes},
        {"group", call.group->name},
        {"group_size", group_size},
        {"group_call", static_cast<int64_t>(call.sequence)},
        {"dtype", std::string(c10::toString(call.dtype))},
        {"peer", call.peer}};
    const std::string name = str(prefix, name_of(call.op), *call.phase ? " " : "", call.phase,
                                 *call.module ? " " : "", call.module);
    record_->before(std::string_view(name), &details);
  }

 private:
  std::optional<at::RecordFunction> record_;
};

bool needs_host_copy(const GroupBackends& backends, const at::Tensor& tensor) {
  return backends.main_is_on_host && tensor.defined() && tensor.is_cuda();
}

at::Tensor pinned_like(const at::Tensor& tensor) {
  return at::empty(tensor.sizes(), tensor.options().device(at::kCPU).pinned_memory(true));
}

// The backend writes without telling autograd; whoever keeps a copy of `tensor` must notice that it changes.
void bump_version(const at::Tensor& tensor) {
  if (tensor.defined() && !tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

/// Ratio of the sizes of `out` and `in`.
struct Ratio {
  int64_t out = 1, in = 1;
};

void check_call(const Group& group, const char* op, const at::Tensor& out, const at::Tensor& in,
                Ratio ratio = {}) {
  TITAN_CHECK(group.contains_me(), op, " in group '", group.name(), "', but this rank isn't a member of it");
  TITAN_CHECK(out.is_contiguous() && in.is_contiguous(), op, " in group '", group.name(),
              "' needs contiguous tensors, got strides ", out.strides(), " (out) and ", in.strides(),
              " (in)");
  TITAN_CHECK(out.scalar_type() == in.scalar_type() && out.device() == in.device(), op, " in group '",
              group.name(), "': out is ", out.scalar_type(), " on ", out.device(), ", in is ",
              in.scalar_type(), " on ", in.device());
  TITAN_CHECK(out.numel() * ratio.in == in.numel() * ratio.out, op, " in group '", group.name(), "' of ",
              group.size(), " ranks: out has ", out.numel(), " elements, in ", in.numel());
}

// Equal parts for each rank, which an empty list means to c10d.
c10::intrusive_ptr<c10d::Work> exchange_parts(c10d::Backend& backend, at::Tensor out, at::Tensor in) {
  std::vector<int64_t> equal;
  return backend.alltoall_base(out, in, equal, equal);
}

// An open NCCL batch holds back all of the thread's calls, even the destruction of groups.
void close_batch(c10d::Backend& backend) {
  try {
    backend.endCoalescing();
  } catch (const std::exception&) {
    // The caller gets the error that broke the batch.
  }
}

template <class T>
T reduce(Group& group, T value, ReduceOp op, Label label) {
  if (group.size() == 1) return value;
  at::Tensor tensor = at::empty({1}, c10::CppTypeToScalarType<T>::value);
  *tensor.data_ptr<T>() = value;
  group.all_reduce(tensor, op, label).wait();
  return *tensor.data_ptr<T>();
}

const std::shared_ptr<FlightRecorder>& recorder_of_unmade_calls() {
  static const auto recorder = std::make_shared<FlightRecorder>(/*num_entries=*/0, /*least_slots=*/1);
  return recorder;
}

std::vector<int64_t> all_gather_sizes(Group& group, int64_t size, Label label) {
  at::Tensor mine = at::full({1}, size, at::kLong), all = at::zeros({group.size()}, at::kLong);
  group.all_gather(all, mine, label).wait();
  const auto* first = all.data_ptr<int64_t>();
  return {first, first + group.size()};
}

}  // namespace

struct Work::State {
  c10::intrusive_ptr<c10d::Work> work;
  at::Tensor out, in;              // alive until the backend is done with them
  std::vector<at::Tensor> others;  // the rest of a batch, likewise
  at::Tensor host_out;             // gloo with a device tensor: copied to `out` at the end
  at::Tensor summands;             // [size, n], gloo's reduce_scatter: summed into `out` at the end
  std::shared_ptr<StagingPool> staging;
  std::shared_ptr<FlightRecorder> recorder;
  uint64_t number = 0;
  CallRecord call;
  int group_size = 0;
  int group_rank = 0;
  int peer_in_world = -1;          // the peer's world rank
  CallChecker* checker = nullptr;  // the group's; the group outlives its calls
  bool is_recorded = false;        // in a graph: it is made when that is launched

  void wait() {
    const CollectiveRange traced("wait ", call, group_size);
    recorder->wait(number);
    try {
      if (checker && call.op == CollectiveOp::Receive) checker->check_received(call);
      wait_for_peers();
      if (summands.defined()) sum_up();
      if (host_out.defined()) copy_into(out, host_out);
    } catch (const std::exception& error) {
      fail(error);
    }
    finish();
  }

  void finish() {
    const bool on_device = out.defined() && !out.is_cpu() && !host_out.defined() && !is_recorded;
    DeviceBackend* devices = on_device ? device_backend() : nullptr;
    std::function<DeviceCall()> ask = devices ? devices->completion_of(*work) : nullptr;
    if (ask)
      recorder->finish_when(number, std::move(ask));
    else
      recorder->finish(number, CallState::Finished);
  }

  void wait_for_peers() {
    const PeerWait on_device(name_of(call.op));
    const auto start = std::chrono::steady_clock::now();
    work->wait();
    recorder->add_wait(std::chrono::nanoseconds(std::chrono::steady_clock::now() - start).count());
  }

  // In rank order regardless of arrival, so that every run gives the same bits. 16-bit numbers are summed in
  // fp32.
  void sum_up() {
    at::NoGradGuard no_grad;
    at::Tensor target = (host_out.defined() ? host_out : out).variable_data().view(-1);
    at::sum_out(target, summands.view({group_size, -1}), /*dim=*/0);
    staging->release(std::move(summands));
  }

  [[noreturn]] void fail(const std::exception& error) const {
    recorder->finish(number, CallState::Failed);
    std::string message = str(call.failure(), " on its rank ", group_rank, " of ", group_size, " (");
    if (*call.phase) message += str(call.phase, *call.module ? " " : "", call.module, ", ");
    if (call.peer >= 0)
      message += str("peer ", call.peer, ", which is rank ", peer_in_world, " of the job, ");
    throw Error(str(message, call.bytes, " bytes): ", first_line_of(error)));
  }
};

Work::Work() noexcept = default;
Work::Work(Work&&) noexcept = default;

Work& Work::operator=(Work&& other) noexcept {
  if (this != &other) {
    Work finished(std::move(*this));
    state_ = std::move(other.state_);
  }
  return *this;
}

Work::~Work() {
  // While an exception unwinds, the peers may never make this call; the backend keeps the tensors it needs.
  if (!state_ || std::uncaught_exceptions() > 0) return;
  try {
    state_->wait();
  } catch (const std::exception&) {
    // The ring holds the failure, and the next call of the group fails, too.
  }
}

bool Work::pending() const { return state_ && (state_->is_recorded || !state_->work->isCompleted()); }

void Work::wait() {
  if (auto state = std::move(state_)) state->wait();
}

Group::Group(Parts parts)
    : name_(std::move(parts.name)),
      ranks_(std::move(parts.ranks)),
      backends_(std::move(parts.backends)),
      recorder_(std::move(parts.recorder)),
      checker_(std::move(parts.checker)),
      num_sent_(ranks_.size()),
      num_received_(ranks_.size()) {
  for (size_t i = 0; i < ranks_.size(); ++i)
    if (ranks_[i] == parts.my_world_rank) rank_ = static_cast<int>(i);
  if (recorder_ && contains_me()) record_ = recorder_->add_group(name_, parts.purpose, ranks_);
  by_exchange_ = backend_name() == "gloo";
  if (backends_) backends_->main_is_on_host = by_exchange_ || backend_name() == "host";
  if (by_exchange_) staging_ = std::make_shared<StagingPool>();
}

std::shared_ptr<Group> Group::alone(std::string name, int my_world_rank) {
  return std::make_shared<Group>(
      Parts{std::move(name), "", {my_world_rank}, my_world_rank, nullptr, nullptr, nullptr});
}

Group::~Group() {
  // Ending a gloo group joins its threads, which may be in a call whose peers never come. While an error is
  // on its way to main(), which ends the process, leave the threads to that.
  if (std::uncaught_exceptions() > 0) static_cast<void>(backends_.release());
}

CallRecord Group::record_of(CollectiveOp op, const at::Tensor& out, const at::Tensor& in, Label label,
                            int peer) const {
  CallRecord call;
  call.op = op;
  call.group = record_;
  call.set_label(label.phase, label.module);
  call.peer = peer;
  if (!out.defined()) return call;
  call.bytes = static_cast<int64_t>(std::max(out.nbytes(), in.nbytes()));
  call.dtype = out.scalar_type();
  call.out.set(out.sizes());
  call.in.set(in.sizes());
  return call;
}

uint64_t Group::next_sequence(const CallRecord& call) {
  const auto peer = static_cast<size_t>(call.peer);
  std::atomic<uint64_t>& next = call.op == CollectiveOp::Send      ? num_sent_[peer]
                                : call.op == CollectiveOp::Receive ? num_received_[peer]
                                                                   : num_collectives_;
  return next.fetch_add(1, std::memory_order_relaxed);
}

// Compares on the host, wherever the tensors are, in the order of the calls.
void Group::check(const CallRecord& call) {
  if (call.op == CollectiveOp::Send) return checker_->announce_sent(call);
  if (call.op == CollectiveOp::Receive) return;  // checked in wait(): the peer may send later
  checker_->check(call, backends_->for_tensor(at::empty({0}, at::kByte)));
}

template <class Start>
Work Group::launch(CallRecord call, const at::Tensor& out, const at::Tensor& in, Start start) {
  TITAN_CHECK(backends_, name_of(call.op), " in group '", name_, "', which ",
              closed_ ? "was closed when a call failed" : "was made without a backend");
  auto state = std::make_unique<Work::State>();
  state->out = out;
  state->in = in;
  // A tensor that is sent may be needed unchanged: a stage's output by its own backward.
  const bool writes = call.op != CollectiveOp::Send;
  if (writes) bump_version(out);
  state->is_recorded = out.defined() && !out.is_cpu() && WorkGraph::records(out.device());
  if (state->is_recorded)
    WorkGraph::add([this, call](const std::function<DeviceCall()>& ask) {
      CallRecord made = call;
      made.sequence = next_sequence(call);
      recorder_->finish_when(recorder_->start(made), ask);
    });
  else
    call.sequence = next_sequence(call);
  state->call = call;
  state->group_rank = rank_;
  state->group_size = size();
  if (call.peer >= 0) state->peer_in_world = ranks_[static_cast<size_t>(call.peer)];
  state->recorder = state->is_recorded ? recorder_of_unmade_calls() : recorder_;
  state->checker = checker_.get();
  c10d::Backend* backend = nullptr;
  try {
    backend = &backends_->for_tensor(out);
  } catch (const std::exception& error) {  // the members didn't connect
    state->number = state->recorder->start(call);
    state->fail(error);
  }
  at::Tensor sent = in, received = out;
  if (needs_host_copy(*backends_, out)) {
    sent = in.cpu();
    received = in.is_same(out) ? sent : pinned_like(out);
    if (writes) state->host_out = received;
  }
  state->number = state->recorder->start(call);
  const CollectiveRange traced("", call, size());
  try {
    if (checker_) check(call);
    state->work = start(*backend, received, sent);
  } catch (const std::exception& error) {
    state->fail(error);
  }
  Work work;
  work.state_ = std::move(state);
  return work;
}

Work Group::all_gather(const at::Tensor& out, const at::Tensor& in, Label label) {
  check_call(*this, "all_gather", out, in, {.out = size()});
  if (size() == 1) {
    copy_into(out, in);
    return {};
  }
  return launch(record_of(CollectiveOp::AllGather, out, in, label), out, in,
                [](auto& backend, auto& received, auto& sent) {
                  if (received.dim() == 1 && sent.dim() == 1) return backend._allgather_base(received, sent);
                  // Gloo needs the parts along the first dimension; a caller's tensor may have one more
                  // dimension for the ranks.
                  at::Tensor flat_out = received.view(-1), flat_in = sent.view(-1);
                  return backend._allgather_base(flat_out, flat_in);
                });
}

Work Group::reduce_scatter(const at::Tensor& out, const at::Tensor& in, Label label) {
  check_call(*this, "reduce_scatter", out, in, {.in = size()});
  if (size() == 1) {
    copy_into(out, in);
    return {};
  }
  const CallRecord call = record_of(CollectiveOp::ReduceScatter, out, in, label);
  if (!by_exchange_) {
    return launch(call, out, in, [](auto& backend, auto& received, auto& sent) {
      return backend._reduce_scatter_base(received, sent);
    });
  }
  at::Tensor summands = staging_->acquire(in.numel(), in.scalar_type());
  Work work = launch(call, out, in, [&](auto& backend, auto&, auto& sent) {
    return exchange_parts(backend, summands, sent.view(-1));
  });
  work.state_->summands = std::move(summands);
  work.state_->staging = staging_;
  return work;
}

Work Group::all_reduce(const at::Tensor& tensor, ReduceOp op, Label label) {
  check_call(*this, "all_reduce", tensor, tensor);
  if (size() == 1) return {};
  CallRecord call = record_of(CollectiveOp::AllReduce, tensor, tensor, label);
  call.reduce = static_cast<int8_t>(op);
  return launch(call, tensor, tensor, [op](auto& backend, auto& received, auto&) {
    std::vector<at::Tensor> tensors = {received};
    c10d::AllreduceOptions options;
    options.reduceOp = to_c10d(op);
    return backend.allreduce(tensors, options);
  });
}

Work Group::broadcast(const at::Tensor& tensor, int root, Label label) {
  check_call(*this, "broadcast", tensor, tensor);
  TITAN_CHECK(root >= 0 && root < size(), "broadcast from rank ", root, " of group '", name_, "' of ",
              size());
  if (size() == 1) return {};
  return launch(record_of(CollectiveOp::Broadcast, tensor, tensor, label, root), tensor, tensor,
                [root](auto& backend, auto& received, auto&) {
                  std::vector<at::Tensor> tensors = {received};
                  c10d::BroadcastOptions options;
                  options.rootRank = root;
                  return backend.broadcast(tensors, options);
                });
}

Work Group::all_to_all(const at::Tensor& out, const at::Tensor& in, Label label) {
  check_call(*this, "all_to_all", out, in);
  TITAN_CHECK(in.numel() % size() == 0, "all_to_all in group '", name_, "' of ", size(),
              " ranks: ", in.numel(), " elements don't divide");
  if (size() == 1) {
    copy_into(out, in);
    return {};
  }
  return launch(record_of(CollectiveOp::AllToAll, out, in, label), out, in,
                [](auto& backend, auto& received, auto& sent) {
                  return exchange_parts(backend, received.view(-1), sent.view(-1));
                });
}

void Group::check_peer(const char* does, int peer) const {
  TITAN_CHECK(peer >= 0 && peer < size() && peer != rank_, does, " rank ", peer, " of group '", name_,
              "' of ", size(), " on rank ", rank_);
}

Work Group::send(const at::Tensor& tensor, int peer, Label label) {
  check_call(*this, "send", tensor, tensor);
  check_peer("send to", peer);
  return launch(record_of(CollectiveOp::Send, tensor, tensor, label, peer), tensor, tensor,
                [peer](auto& backend, auto&, auto& sent) {
                  std::vector<at::Tensor> tensors = {sent};
                  return backend.send(tensors, peer, /*tag=*/0);
                });
}

Work Group::receive(const at::Tensor& tensor, int peer, Label label) {
  check_call(*this, "receive", tensor, tensor);
  check_peer("receive from", peer);
  return launch(record_of(CollectiveOp::Receive, tensor, tensor, label, peer), tensor, tensor,
                [peer](auto& backend, auto& received, auto&) {
                  std::vector<at::Tensor> tensors = {received};
                  return backend.recv(tensors, peer, /*tag=*/0);
                });
}

// Where each message is a call of its own and calls may run one after the other, a ring or a pair of ranks
// needs one rank that receives first.
Exchange Group::exchange(const at::Tensor& sent, int to, const at::Tensor& received, int from, Label label) {
  Exchange both;
  if (!has_batches(sent.device())) {
    if (rank_ < to) both.sent = send(sent, to, label);
    both.received = receive(received, from, label);
    if (rank_ > to) both.sent = send(sent, to, label);
    return both;
  }
  c10d::Backend& backend = backends_->for_tensor(sent);
  backend.startCoalescing();
  try {
    both.sent = send(sent, to, label);
    both.received = receive(received, from, label);
  } catch (const std::exception&) {
    close_batch(backend);
    throw;
  }
  try {
    both.sent.state_->work = both.received.state_->work = backend.endCoalescing();
  } catch (const std::exception& error) {
    both.received.state_->fail(error);
  }
  return both;
}

bool Group::has_batches(c10::Device device) const {
  if (!backends_ || backends_->on_host(device)) return false;  // gloo has none
  return !backends_->main || backends_->main->supportsCoalescing();
}

void Group::add_to(RegisteredMemory& memory) {
  if (size() == 1) return;
  TITAN_CHECK(backend_name() == "nccl", "the memory of group '", name_,
              "' can't be registered: its backend is ", backend_name(), ", and only NCCL registers memory");
  backends_->made(backends_->main, backends_->make_main);
  memory.add(backends_->main);
}

// As record_of() does it for one tensor.
static void list_tensors(CallRecord& call, const std::vector<at::Tensor>& outs,
                         const std::vector<at::Tensor>& ins) {
  call.bytes = 0;
  int64_t received = 0, sent = 0;
  bool are_alike = true;
  for (size_t i = 0; i < outs.size(); ++i) {
    call.bytes += static_cast<int64_t>(std::max(outs[i].nbytes(), ins[i].nbytes()));
    received += outs[i].numel();
    sent += ins[i].numel();
    are_alike &= outs[i].sizes() == outs[0].sizes() && ins[i].sizes() == ins[0].sizes();
  }
  if (are_alike) {
    call.num_tensors = static_cast<int32_t>(outs.size());
  } else {
    call.out.set({received});
    call.in.set({sent});
  }
}

template <class Add>
Work Group::launch_batch(CollectiveOp op, const std::vector<at::Tensor>& tensors, int peer, Label label,
                         Add add) {
  TITAN_CHECK(!tensors.empty() && has_batches(tensors[0].device()), name_of(op), " of ", tensors.size(),
              " tensors in one call in group '", name_, "', ",
              closed_ ? "which was closed when a call failed" : "whose backend is " + backend_name());
  const at::Tensor& first = tensors[0];
  for (const at::Tensor& tensor : tensors) {
    check_call(*this, name_of(op), tensor, first);
    if (op == CollectiveOp::Receive && !tensor.is_same(first)) bump_version(tensor);
  }
  CallRecord call = record_of(op, first, first, label, peer);
  list_tensors(call, tensors, tensors);
  Work work = launch(call, first, first, [&](auto& backend, auto&, auto&) {
    backend.startCoalescing();
    try {
      for (const at::Tensor& tensor : tensors) {
        std::vector<at::Tensor> one = {tensor};
        add(backend, one);
      }
    } catch (const std::exception&) {
      close_batch(backend);
      throw;
    }
    return backend.endCoalescing();
  });
  work.state_->others.assign(tensors.begin() + 1, tensors.end());
  return work;
}

Work Group::send(const std::vector<at::Tensor>& tensors, int peer, Label label) {
  check_peer("send to", peer);
  return launch_batch(CollectiveOp::Send, tensors, peer, label,
                      [peer](auto& backend, auto& one) { backend.send(one, peer, /*tag=*/0); });
}

Work Group::receive(const std::vector<at::Tensor>& tensors, int peer, Label label) {
  check_peer("receive from", peer);
  return launch_batch(CollectiveOp::Receive, tensors, peer, label,
                      [peer](auto& backend, auto& one) { backend.recv(one, peer, /*tag=*/0); });
}

template <class Start>
Work Group::launch_all(CollectiveOp op, const std::vector<at::Tensor>& outs,
                       const std::vector<at::Tensor>& ins, Label label, Start start) {
  TITAN_CHECK(!outs.empty() && outs.size() == ins.size() && (size() == 1 || has_batches(outs[0].device())),
              name_of(op), " of ", outs.size(), " and ", ins.size(), " tensors in one call in group '", name_,
              "', ", closed_ ? "which was closed when a call failed" : "whose backend is " + backend_name());
  const bool gathers = op == CollectiveOp::AllGather;
  for (size_t i = 0; i < outs.size(); ++i) {
    check_call(*this, name_of(op), outs[i], ins[i], gathers ? Ratio{.out = size()} : Ratio{.in = size()});
    if (i > 0) bump_version(outs[i]);  // launch() raises the first one's
  }
  if (size() == 1) {
    for (size_t i = 0; i < outs.size(); ++i) copy_into(outs[i], ins[i]);
    return {};
  }
  CallRecord call = record_of(op, outs[0], ins[0], label);
  list_tensors(call, outs, ins);
  Work work = launch(call, outs[0], ins[0], [&](auto& backend, auto&, auto&) {
    std::vector<at::Tensor> to = outs, from = ins;
    return start(backend, to, from);
  });
  for (const auto* others : {&outs, &ins})
    work.state_->others.insert(work.state_->others.end(), others->begin() + 1, others->end());
  return work;
}

Work Group::all_gather(const std::vector<at::Tensor>& outs, const std::vector<at::Tensor>& ins, Label label) {
  return launch_all(CollectiveOp::AllGather, outs, ins, label, [](auto& backend, auto& to, auto& from) {
    return backend.allgather_into_tensor_coalesced(to, from);
  });
}

Work Group::reduce_scatter(const std::vector<at::Tensor>& outs, const std::vector<at::Tensor>& ins,
                           Label label) {
  return launch_all(CollectiveOp::ReduceScatter, outs, ins, label, [](auto& backend, auto& to, auto& from) {
    return backend.reduce_scatter_tensor_coalesced(to, from);
  });
}

Work Group::barrier(Label label) {
  TITAN_CHECK(contains_me(), "barrier in group '", name_, "', but this rank isn't a member of it");
  if (size() == 1) return {};
  return launch(record_of(CollectiveOp::Barrier, {}, {}, label), {}, {},
                [](auto& backend, auto&, auto&) { return backend.barrier(); });
}

void Group::close() {
  if (!backends_ || backend_name() == "fake") return;
  closed_ = true;
  if (!backends_->make_host) return backends_.reset();
  // The end of a device group would wait for the device, so it is left to the end of the process. The abort
  // doesn't wait for other groups' kernels.
  if (auto group = backends_.release()->main)
    within(std::chrono::milliseconds(0), [group] { group->abort(); });
}

std::string Group::backend_name() const {
  if (!backends_) return "none";
  return backends_->main ? backends_->main->getBackendName() : "nccl";
}

void Group::set_timeout(std::chrono::milliseconds timeout) {
  if (!backends_) return;
  if (checker_) checker_->set_timeout(timeout);
  backends_->timeout = timeout;
  for (const BackendPtr& backend : {backends_->main, backends_->host})
    if (backend) backend->setTimeout(timeout);
}

// ---- small host values

double Group::sum(double value, Label label) { return reduce(*this, value, ReduceOp::Sum, label); }
double Group::max(double value, Label label) { return reduce(*this, value, ReduceOp::Max, label); }
int64_t Group::sum(int64_t value, Label label) { return reduce(*this, value, ReduceOp::Sum, label); }

std::vector<std::string> Group::all_gather_text(const std::string& text, Label label) {
  if (size() == 1) return {text};
  const auto sizes = all_gather_sizes(*this, static_cast<int64_t>(text.size()), label);
  const int64_t longest = std::max<int64_t>(1, *std::max_element(sizes.begin(), sizes.end()));
  at::Tensor mine = at::zeros({longest}, at::kByte), all = at::empty({size() * longest}, at::kByte);
  std::memcpy(mine.data_ptr(), text.data(), text.size());
  all_gather(all, mine, label).wait();
  const auto* bytes = static_cast<const char*>(all.data_ptr());
  std::vector<std::string> texts;
  for (int i = 0; i < size(); ++i) texts.emplace_back(bytes + i * longest, static_cast<size_t>(sizes[i]));
  return texts;
}

}  // namespace titan::dist
