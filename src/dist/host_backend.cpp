// Collectives among the ranks of one host. The group's one thread does calls in order: it posts where this
// rank's tensor is, meets each peer, reads its part of the peer's tensor, and finishes. It visits the peers
// beginning with the next rank, so that not all read from one; sums are still added in rank order, so that
// every run gives the same bits.

#include "dist/backends.h"

#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "dist/flight_record.h"
#include "host_channel.h"
#include "host_sum.h"
#include "titan/core/error.h"

namespace titan::dist {
namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;

class HostWork final : public c10d::Work {
 public:
  void complete(std::exception_ptr error) { finish(std::move(error)); }
};

/// A thread that does the calls it is given, in order. Ends when all are done.
class Worker {
 public:
  Worker() : thread_([this] { run(); }) {}
  ~Worker() {
    {
      std::lock_guard lock(mutex_);
      ending_ = true;
    }
    more_.notify_one();
    thread_.join();
  }
  WorkPtr submit(std::function<void()> call) {
    auto work = c10::make_intrusive<HostWork>();
    {
      std::lock_guard lock(mutex_);
      queue_.emplace_back(work, std::move(call));
    }
    more_.notify_one();
    return work;
  }

 private:
  using Task = std::pair<c10::intrusive_ptr<HostWork>, std::function<void()>>;

  void run() {
    while (true) {
      std::unique_lock lock(mutex_);
      more_.wait(lock, [this] { return ending_ || !queue_.empty(); });
      if (queue_.empty()) return;
      Task task = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      std::exception_ptr error;
      try {
        task.second();
      } catch (...) {
        error = std::current_exception();
      }
      task.second = nullptr;  // releases the tensors before anybody learns that the call is done
      task.first->complete(error);
    }
  }

  std::mutex mutex_;
  std::condition_variable more_;
  std::deque<Task> queue_;
  bool ending_ = false;
  std::thread thread_;  // last: it uses all of the above
};

ReduceOp from_c10d(const c10d::ReduceOp& op) {
  if (op == c10d::ReduceOp::SUM) return ReduceOp::Sum;
  TITAN_CHECK(op == c10d::ReduceOp::MAX || op == c10d::ReduceOp::MIN,
              "ranks of one host reduce by sum, max and min");
  return op == c10d::ReduceOp::MAX ? ReduceOp::Max : ReduceOp::Min;
}

char* bytes_of(const at::Tensor& tensor) { return static_cast<char*>(tensor.data_ptr()); }

/// The calls themselves, on the worker's thread.
class HostCollectives {
 public:
  explicit HostCollectives(std::unique_ptr<HostChannel> channel) : channel_(std::move(channel)) {}

  HostChannel& channel() { return *channel_; }

  void all_gather(const at::Tensor& out, const at::Tensor& in) {
    const uint64_t part = in.nbytes();
    post(CollectiveOp::AllGather, out.nbytes(), in);
    char* own = bytes_of(out) + rank() * part;
    if (own != bytes_of(in)) std::memcpy(own, bytes_of(in), part);
    for_each_peer([&](int peer) { channel_->read(peer, 0, bytes_of(out) + peer * part, part); });
    channel_->finish();
  }

  void all_to_all(const at::Tensor& out, const at::Tensor& in) {
    const uint64_t part = in.nbytes() / size();
    post(CollectiveOp::AllToAll, in.nbytes(), in);
    std::memcpy(bytes_of(out) + rank() * part, bytes_of(in) + rank() * part, part);
    for_each_peer([&](int peer) { channel_->read(peer, rank() * part, bytes_of(out) + peer * part, part); });
    channel_->finish();
  }

  void broadcast(const at::Tensor& tensor, int root) {
    post(CollectiveOp::Broadcast, tensor.nbytes(), tensor);
    if (rank() != root) {
      channel_->meet(root);
      channel_->read(root, 0, bytes_of(tensor), tensor.nbytes());
    }
    channel_->finish();
  }

  void barrier() {
    channel_->post({static_cast<uint32_t>(CollectiveOp::Barrier), 0, nullptr});
    for_each_peer([](int) {});
    channel_->finish();
  }

  void reduce_scatter(const at::Tensor& out, const at::Tensor& in) {
    post(CollectiveOp::ReduceScatter, in.nbytes(), in);
    reduce(in, rank() * out.numel(), out.numel(), bytes_of(out), ReduceOp::Sum);
    channel_->finish();
  }

  void all_reduce(const at::Tensor& tensor, ReduceOp op) {
    // Few elements: every rank reduces all of them. More: every rank reduces its stretch, then they are
    // gathered. Either way the result is kept aside until all have read the tensor that it goes to.
    const int64_t n = tensor.numel(), few = 1024;
    const int64_t stretch = n <= few ? n : (n + size() - 1) / size();
    const int64_t start = n <= few ? 0 : std::min(n, rank() * stretch), length = std::min(n - start, stretch);
    char* result = scratch(result_, static_cast<uint64_t>(length) * tensor.itemsize());
    post(CollectiveOp::AllReduce, tensor.nbytes(), tensor);
    reduce(tensor, start, length, result, op);
    channel_->finish();
    const uint64_t start_byte = start * tensor.itemsize();
    std::memcpy(bytes_of(tensor) + start_byte, result, length * tensor.itemsize());
    if (n > few) gather_stretches(tensor, stretch);
  }

 private:
  int rank() const { return channel_->rank(); }
  int size() const { return channel_->size(); }

  void post(CollectiveOp op, uint64_t bytes, const at::Tensor& source) {
    channel_->post({static_cast<uint32_t>(op), bytes, source.data_ptr()});
  }

  template <class Visit>
  void for_each_peer(Visit visit) {
    for (int step = 1; step < size(); ++step) {
      const int peer = (rank() + step) % size();
      channel_->meet(peer);
      visit(peer);
    }
  }

  void gather_stretches(const at::Tensor& tensor, int64_t stretch) {
    const int64_t n = tensor.numel();
    post(CollectiveOp::AllReduce, tensor.nbytes(), tensor);
    for_each_peer([&](int peer) {
      const int64_t start = std::min(n, peer * stretch), length = std::min(n - start, stretch);
      const uint64_t offset = start * tensor.itemsize();
      channel_->read(peer, offset, bytes_of(tensor) + offset, length * tensor.itemsize());
    });
    channel_->finish();
  }

  /// All ranks' elements [start, start + length), reduced in rank order, to `target`.
  void reduce(const at::Tensor& own, int64_t start, int64_t length, char* target, ReduceOp op) {
    Reducer* reducer = reducer_of(own.scalar_type(), op);
    const uint64_t item = own.itemsize();
    char* part = scratch(part_, Reducer::kCapacity * item);
    for (int peer = 0; peer < size(); ++peer) {
      if (peer != rank()) channel_->meet(peer);
    }
    for (int64_t at = 0; at < length; at += Reducer::kCapacity) {
      const int64_t n = std::min(Reducer::kCapacity, length - at);
      const uint64_t offset = (start + at) * item;
      for (int peer = 0; peer < size(); ++peer) {
        if (peer != rank()) channel_->read(peer, offset, part, n * item);
        const char* values = peer == rank() ? bytes_of(own) + offset : part;
        peer == 0 ? reducer->begin(values, n) : reducer->add(values, n);
      }
      reducer->store(target + at * item, n);
    }
  }

  /// Reuses the last one if it fits: a run reduces few types.
  Reducer* reducer_of(at::ScalarType dtype, ReduceOp op) {
    if (!reducer_ || reducer_dtype_ != dtype || reducer_op_ != op) {
      reducer_ = make_reducer(dtype, op);
      reducer_dtype_ = dtype;
      reducer_op_ = op;
    }
    return reducer_.get();
  }

  static char* scratch(std::vector<char>& memory, uint64_t bytes) {
    if (memory.size() < bytes) memory.resize(bytes);
    return memory.data();
  }

  std::unique_ptr<HostChannel> channel_;
  std::vector<char> part_, result_;
  std::unique_ptr<Reducer> reducer_;
  at::ScalarType reducer_dtype_ = at::kFloat;
  ReduceOp reducer_op_ = ReduceOp::Sum;
};

class HostBackend final : public c10d::Backend {
 public:
  HostBackend(std::unique_ptr<HostChannel> channel, BackendPtr sockets)
      : Backend(channel->rank(), channel->size()), sockets_(std::move(sockets)), calls_(std::move(channel)) {}

  const std::string getBackendName() const override { return "host"; }
  void setTimeout(std::chrono::milliseconds timeout) override {
    calls_.channel().set_timeout(timeout);
    sockets_->setTimeout(timeout);
  }

  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions&) override {
    return worker_.submit([this, out, in] { calls_.all_gather(out, in); });
  }
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions&) override {
    check_dtype(in);
    return worker_.submit([this, out, in] { calls_.reduce_scatter(out, in); });
  }
  WorkPtr alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>&, std::vector<int64_t>&,
                        const c10d::AllToAllOptions&) override {
    return worker_.submit([this, out, in] { calls_.all_to_all(out, in); });
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    const ReduceOp op = from_c10d(options.reduceOp);
    check_dtype(tensors[0]);
    return worker_.submit([this, tensor = tensors[0], op] { calls_.all_reduce(tensor, op); });
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    const int root = static_cast<int>(options.rootRank);
    return worker_.submit([this, tensor = tensors[0], root] { calls_.broadcast(tensor, root); });
  }
  WorkPtr barrier(const c10d::BarrierOptions&) override {
    return worker_.submit([this] { calls_.barrier(); });
  }
  WorkPtr send(Tensors& tensors, int peer, int tag) override { return sockets_->send(tensors, peer, tag); }
  WorkPtr recv(Tensors& tensors, int peer, int tag) override { return sockets_->recv(tensors, peer, tag); }

 private:
  /// Before the call rather than in its middle, where an error would leave the ranks out of step.
  static void check_dtype(const at::Tensor& tensor) {
    TITAN_CHECK(can_reduce(tensor.scalar_type()), "ranks of one host can't reduce ", tensor.scalar_type());
  }

  BackendPtr sockets_;
  HostCollectives calls_;
  Worker worker_;  // last: its thread uses the above
};

bool agreed(c10d::Backend& sockets, bool mine) {
  std::vector<at::Tensor> all = {at::full({1}, mine ? 1 : 0, at::kInt)};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MIN;
  sockets.allreduce(all, options)->wait();
  return all[0].item<int>() == 1;
}

}  // namespace

BackendPtr make_host_group(const GroupSpec& spec, BackendPtr sockets) {
  auto channel = std::make_unique<HostChannel>(spec);
  if (!agreed(*sockets, channel->attach(*spec.store))) return {};
  if (!agreed(*sockets, channel->can_read())) return {};
  return c10::make_intrusive<HostBackend>(std::move(channel), std::move(sockets));
}

}  // namespace titan::dist
