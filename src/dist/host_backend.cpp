// Collectives among the ranks of one host. The group's one thread runs calls in order: it posts the address
// of this rank's tensor, meets each peer, reads its part of the peer's tensor, and finishes. It visits the
// peers beginning with the next rank, so that not all ranks read from the same one; sums are still added in
// rank order, so that every run gives the same bits.

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "core/process.h"
#include "dist/backends.h"
#include "dist/flight_record.h"
#include "dist/host_sum.h"
#include "titan/core/error.h"

namespace titan::dist {
namespace {

// ---- the channel

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

void futex_wait(std::atomic<uint32_t>& word, uint32_t seen, long milliseconds) {
  const timespec time{milliseconds / 1000, (milliseconds % 1000) * 1000000};
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &time, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

/// Rank 0 makes a file without a name, which disappears with the last process that has it open. The others
/// open it through rank 0's descriptor.
int make_shared_file(c10d::Store& store, size_t bytes) {
  int file = memfd_create("titan_group", MFD_CLOEXEC);
  if (file >= 0 && ftruncate(file, static_cast<off_t>(bytes)) != 0) {
    close(file);
    file = -1;
  }
  store.set("file", file >= 0 ? str("/proc/", getpid(), "/fd/", file) : "none");
  return file;
}

int open_shared_file(c10d::Store& store) {
  return open(store.get_to_str("file").c_str(), O_RDWR | O_CLOEXEC);
}

bool read_process(int pid, const void* source, void* target, uint64_t bytes) {
  auto* to = static_cast<char*>(target);
  auto* from = static_cast<const char*>(source);
  while (bytes > 0) {
    const iovec local{to, bytes}, remote{const_cast<char*>(from), bytes};
    const ssize_t n = process_vm_readv(pid, &local, 1, &remote, 1, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    to += n;
    from += n;
    bytes -= static_cast<uint64_t>(n);
  }
  return true;
}

/// A rank's description of one call. `op` and `bytes` must be equal on all ranks, or the call fails.
struct Posting {
  uint32_t op = 0;  ///< a CollectiveOp
  uint64_t bytes = 0;
  const void* address = nullptr;
};

/// The meeting place of a group's ranks on one host: a small block of shared memory in which each rank posts
/// its call and the address of its tensor. The others copy the tensor with process_vm_readv: once, without
/// sockets or staging buffers.
class HostChannel {
 public:
  explicit HostChannel(const GroupSpec& spec)
      : rank_(spec.rank),
        size_(spec.size),
        timeout_(spec.timeout.count()),
        block_bytes_(kHeaderBytes + sizeof(Slot) * static_cast<size_t>(spec.size)) {}
  ~HostChannel() {
    if (block_) munmap(block_, block_bytes_);
    if (file_ >= 0) close(file_);
    for (const int fd : pidfds_)
      if (fd >= 0) close(fd);
  }
  HostChannel(const HostChannel&) = delete;
  HostChannel& operator=(const HostChannel&) = delete;

  // The ranks try whether the kernel or container allows this: all of them attach(), agree (over sockets)
  // that all could, do the same for can_read(), and drop the channel otherwise.

  bool attach(c10d::Store& store) {
    // If Yama lets only ancestors read a process (ptrace_scope 1), this admits every process of the same
    // user.
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
    const int file = rank_ == 0 ? make_shared_file(store, block_bytes_) : open_shared_file(store);
    if (file < 0) return false;
    void* memory = mmap(nullptr, block_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (rank_ == 0)
      file_ = file;
    else
      close(file);
    if (memory == MAP_FAILED) return false;
    // Fresh pages are zero, the initial value of every field.
    block_ = static_cast<Block*>(memory);
    Slot& mine = slot(rank_);
    mine.token = kToken + static_cast<uint64_t>(rank_);
    mine.posting.address = &mine.token;
    mine.pid.store(getpid());
    return true;
  }

  bool can_read() {
    if (file_ >= 0) close(std::exchange(file_, -1));
    for (int peer = 0; peer < size_; ++peer) {
      const Slot& theirs = slot(peer);
      uint64_t token = 0;
      if (!read_process(theirs.pid, theirs.posting.address, &token, sizeof(token))) return false;
      if (token != kToken + static_cast<uint64_t>(peer)) return false;
      pidfds_.push_back(static_cast<int>(syscall(SYS_pidfd_open, theirs.pid.load(), 0)));
    }
    return true;
  }

  int rank() const { return rank_; }
  int size() const { return size_; }
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout.count(); }

  /// Begins the next call: the others may read `posting.address` until finish() returns.
  void post(const Posting& posting) {
    TITAN_CHECK(broken_.empty(), "an earlier call of the group failed: ", broken_);
    mine_ = posting;
    Slot& mine = slot(rank_);
    mine.posting = posting;
    mine.posted.store(++call_);
    ring();
  }

  /// Waits until `peer` makes this call, too. Throws Error that names it if it doesn't in time, has ended,
  /// gave up, or made another call.
  void meet(int peer) {
    wait_for(peer, slot(peer).posted, "make");
    // Nobody posts the next call before all have finished this one, so the posting belongs to this call.
    const Posting& theirs = slot(peer).posting;
    if (theirs.op == mine_.op && theirs.bytes == mine_.bytes) return;
    const auto name = [](const Posting& posting) {
      return str(name_of(static_cast<CollectiveOp>(posting.op)), " of ", posting.bytes, " bytes");
    };
    fail(peer, str("calls ", name(theirs), " where this rank calls ", name(mine_)));
  }

  /// Copies `bytes` from `peer`'s tensor, `offset` bytes into it. Between meet(peer) and finish().
  void read(int peer, uint64_t offset, void* target, uint64_t bytes) {
    const Slot& theirs = slot(peer);
    const auto* source = static_cast<const char*>(theirs.posting.address) + offset;
    if (!read_process(theirs.pid, source, target, bytes))
      fail(peer, str("can't be read: ", errno_text(errno)));
  }

  /// Announces that this rank is done reading, and waits until the others are.
  void finish() {
    slot(rank_).finished.store(call_);
    ring();
    for (int peer = 0; peer < size_; ++peer) wait_for(peer, slot(peer).finished, "finish");
  }

 private:
  using Clock = std::chrono::steady_clock;

  // Each slot takes two neighboring cache lines: a rank writes only its own.
  struct alignas(128) Slot {
    std::atomic<uint64_t> posted;    // the number of the call that is posted
    std::atomic<uint64_t> finished;  // the number of the last call whose reads are done
    std::atomic<uint32_t> gave_up;
    std::atomic<int32_t> pid;
    uint64_t token;  // every peer reads it once: does process_vm_readv work, and is it the right process?
    Posting posting;
  };
  struct Block {
    alignas(128) std::atomic<uint32_t> bell;  // changes with every slot; the ranks sleep on it
  };
  static constexpr uint64_t kToken = 0x7469746e686f7374;
  static constexpr size_t kHeaderBytes = 128;

  Slot& slot(int rank) const {
    auto* first = reinterpret_cast<char*>(block_) + kHeaderBytes;
    return reinterpret_cast<Slot*>(first)[rank];
  }

  void ring() const {
    block_->bell.fetch_add(1);
    futex_wake_all(block_->bell);
  }

  /// Waits until `value` of `peer` reaches this call's number.
  void wait_for(int peer, const std::atomic<uint64_t>& value, const char* what) {
    constexpr long longest_sleep_ms = 50;  // between looks at whether the peer is still there
    // A longer gap means that this process stood still, and perhaps the peer with it.
    constexpr std::chrono::milliseconds longest_gap(4 * longest_sleep_ms);
    const std::chrono::milliseconds limit(timeout_);
    Clock::duration waited{0};
    auto last_look = Clock::now();
    while (value.load() < call_) {
      const uint32_t seen = block_->bell.load();
      if (value.load() >= call_) return;
      check_alive(peer, value);
      const auto now = Clock::now();
      waited += std::min<Clock::duration>(now - std::exchange(last_look, now), longest_gap);
      if (waited > limit)
        fail(peer, str("didn't ", what, " the call within ", static_cast<double>(timeout_) / 1000, " s"));
      futex_wait(block_->bell, seen, longest_sleep_ms);
    }
  }

  // A process that nobody has waited for yet (a zombie) has ended, too: kill() doesn't tell.
  bool has_ended(int peer) const {
    pollfd process{.fd = pidfds_[static_cast<size_t>(peer)], .events = POLLIN, .revents = 0};
    if (process.fd >= 0) return poll(&process, 1, /*timeout=*/0) > 0;
    const int pid = slot(peer).pid;  // an old kernel has no pidfds
    return (kill(pid, 0) != 0 && errno == ESRCH) ||
           status_field(std::to_string(pid), "State").starts_with("Z");
  }

  void check_alive(int peer, const std::atomic<uint64_t>& value) {
    const Slot& theirs = slot(peer);
    const bool ended = has_ended(peer);
    const bool gave_up = theirs.gave_up.load();
    // It may have done its part just before it ended.
    if ((!ended && !gave_up) || value.load() >= call_) return;
    fail(peer, ended ? str("has ended (its pid was ", theirs.pid.load(), ")")
                     : "gave up after an error of its own");
  }

  /// Tells the others that this rank makes no more calls, and throws.
  [[noreturn]] void fail(int peer, const std::string& reason) {
    broken_ = str("rank ", peer, " of the group ", reason);
    slot(rank_).gave_up.store(1);
    ring();
    throw Error(broken_);
  }

  const int rank_, size_;
  std::atomic<int64_t> timeout_;  // milliseconds
  Block* block_ = nullptr;
  size_t block_bytes_ = 0;
  int file_ = -1;            // rank 0's, until all have opened it
  std::vector<int> pidfds_;  // one per rank; -1 where the kernel has none
  uint64_t call_ = 0;
  Posting mine_;
  std::string broken_;  // after an error the ranks have lost their common order: every later call fails
};

// ---- the calls

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;

class HostWork final : public c10d::Work {
 public:
  void complete(std::exception_ptr error) { finish(std::move(error)); }
};

/// A thread that runs the given calls in order. Ends when all are done.
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
    // Few elements: every rank reduces all of them. More: every rank reduces a stretch, then the stretches
    // are gathered. Either way the result is kept aside until all ranks have read the tensor that it
    // replaces.
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
    for (int peer = 0; peer < size(); ++peer)
      if (peer != rank()) channel_->meet(peer);
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

  /// Reuses the last reducer if it fits: a run reduces few types.
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
  /// Checked before the call, because an error inside it would make the ranks lose their common order.
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
