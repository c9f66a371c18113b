#pragma once

// Collectives between the ranks of a group: launched here, finished by Work::wait(). Each call is recorded
// with its label, so that a call that fails or hangs can be named.
//
//   auto group = world.everyone();
//   Work sum = group->all_reduce(loss, ReduceOp::Sum, {"metrics::loss"});
//   sum.wait();
//
// Tensors must be contiguous and stay alive until wait() (the Work holds references). On CUDA, wait() orders
// the call before later work of the current stream and doesn't block the host.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace titan::dist {

class CallChecker;
struct CallRecord;
enum class CollectiveOp : uint8_t;
class FlightRecorder;
struct GroupRecord;
class RegisteredMemory;
class StagingPool;
struct GroupBackends;

/// The phase and the module that issue a call. Both point to strings that live until the call is launched;
/// recording copies them and allocates nothing.
struct Label {
  const char* phase = "";   ///< "fsdp::all_gather", "metrics::loss", ...
  const char* module = "";  ///< "layers.3", or ""
};

/// A launched collective. Move-only. Destroying it without wait() waits too (and swallows errors), except
/// while an exception unwinds: then the peers may never answer. wait() throws Error that names group,
/// operation, label and peer; a second wait() does nothing. In a group of one rank the work is done when the
/// call returns.
class [[nodiscard]] Work {
 public:
  Work() noexcept;
  Work(Work&&) noexcept;
  Work& operator=(Work&&) noexcept;
  ~Work();
  bool pending() const;
  void wait();

 private:
  friend class Group;
  struct State;
  std::unique_ptr<State> state_;
};

enum class ReduceOp { Sum, Max, Min };

/// A message to one rank and one from another.
struct [[nodiscard]] Exchange {
  Work received, sent;
  void wait() {
    received.wait();
    sent.wait();
  }
};

/// Ranks that communicate with each other. All members issue the same calls in the same order. Made by
/// World::group. Takes CPU and device tensors with any backend: gloo gets copies of device tensors in host
/// memory.
class Group {
 public:
  struct Parts {
    std::string name;
    std::string purpose;     ///< distinguishes groups of the same ranks
    std::vector<int> ranks;  ///< world ranks in group order
    int my_world_rank = 0;
    std::unique_ptr<GroupBackends> backends;  ///< may be null in a group of one rank or without this rank
    std::shared_ptr<FlightRecorder> recorder;
    std::unique_ptr<CallChecker> checker;  ///< compares calls with the other members'; may be null
  };
  explicit Group(Parts parts);
  /// The group of one rank: all calls are local and done at once.
  static std::shared_ptr<Group> alone(std::string name, int my_world_rank);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  const std::string& name() const { return name_; }
  int size() const { return static_cast<int>(ranks_.size()); }
  /// Position of this process in the group, -1 when it isn't a member.
  int rank() const { return rank_; }
  bool contains_me() const { return rank_ >= 0; }
  const std::vector<int>& ranks() const { return ranks_; }

  /// out: [size * n], in: [n], same dtype; rank r's part goes to out[r*n .. (r+1)*n).
  Work all_gather(const at::Tensor& out, const at::Tensor& in, Label label);
  /// out: [n], in: [size * n]; out = sum over ranks of in[rank*n ..). Sums, never averages.
  Work reduce_scatter(const at::Tensor& out, const at::Tensor& in, Label label);
  /// In place.
  Work all_reduce(const at::Tensor& tensor, ReduceOp op, Label label);
  Work broadcast(const at::Tensor& tensor, int root, Label label);
  /// out, in: [size * n]; part j of in goes to rank j.
  Work all_to_all(const at::Tensor& out, const at::Tensor& in, Label label);
  Work send(const at::Tensor& tensor, int peer, Label label);
  Work receive(const at::Tensor& tensor, int peer, Label label);
  /// Sends one tensor while receiving another: in one call, where the backend has such calls, so that they
  /// travel at the same time. If all members make such calls in the same rounds, no order of them deadlocks.
  Exchange exchange(const at::Tensor& sent, int to, const at::Tensor& received, int from, Label label);
  /// Whether the backend for this device takes several messages in one call (NCCL does, gloo doesn't).
  bool has_batches(c10::Device device) const;
  /// Several messages in one call, which is done when its last message is; only where has_batches(). All
  /// tensors have one size and dtype, and the peer receives, or sends, as many in one call. Recorded as one
  /// call of all bytes.
  Work send(const std::vector<at::Tensor>& tensors, int peer, Label label);
  Work receive(const std::vector<at::Tensor>& tensors, int peer, Label label);
  /// Several all-gathers, or reduce-scatters, of one dtype in one call; only where has_batches(). outs[i] and ins[i] are
  /// as in a call of their own, but all have elements. Recorded as one call of all bytes.
  Work all_gather(const std::vector<at::Tensor>& outs, const std::vector<at::Tensor>& ins, Label label);
  Work reduce_scatter(const std::vector<at::Tensor>& outs, const std::vector<at::Tensor>& ins, Label label);
  Work barrier(Label label);

  /// Small host values, blocking; free of cost in groups of one rank.
  double sum(double value, Label label);
  double max(double value, Label label);
  int64_t sum(int64_t value, Label label);
  std::vector<std::string> all_gather_text(const std::string& text, Label label);

  /// Registers memory with the communicator, which is made now; nothing in a group of one rank. Throws Error if the backend
  /// isn't NCCL.
  void add_to(RegisteredMemory& memory);

  /// "host" (memory of this host's ranks), "gloo", "nccl", "fake"; "none" in a group of one rank, without
  /// this rank, or closed.
  std::string backend_name() const;
  /// After a failed call: ends everything that goes over sockets (gloo's calls, sends of "host"). Peers that
  /// wait for it get an error, and so does every later call here. Before it, drop this rank's unfinished
  /// Works. Other backends stay as they are.
  void close();
  /// For calls launched from now on.
  void set_timeout(std::chrono::milliseconds timeout);

 private:
  template <class Start>
  Work launch(CallRecord call, const at::Tensor& out, const at::Tensor& in, Start start);
  template <class Add>
  Work launch_batch(CollectiveOp op, const std::vector<at::Tensor>& tensors, int peer, Label label, Add add);
  template <class Start>
  Work launch_all(CollectiveOp op, const std::vector<at::Tensor>& outs, const std::vector<at::Tensor>& ins,
                  Label label, Start start);
  CallRecord record_of(CollectiveOp op, const at::Tensor& out, const at::Tensor& in, Label label,
                       int peer = -1) const;
  uint64_t next_sequence(const CallRecord& call);
  void check(const CallRecord& call);
  void check_peer(const char* does, int peer) const;
  std::string name_;
  std::vector<int> ranks_;
  int rank_ = -1;
  std::unique_ptr<GroupBackends> backends_;
  bool closed_ = false;
  std::shared_ptr<FlightRecorder> recorder_;
  const GroupRecord* record_ = nullptr;
  std::unique_ptr<CallChecker> checker_;
  // gloo's reduce_scatter is an all-reduce of everything, so parts are exchanged and summed here instead.
  bool by_exchange_ = false;
  std::shared_ptr<StagingPool> staging_;
  std::atomic<uint64_t> num_collectives_{0};
  std::vector<std::atomic<uint64_t>> num_sent_, num_received_;  // by peer
};

}  // namespace titan::dist
