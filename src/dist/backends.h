#pragma once

// The kinds of backends that carry a group's calls: gloo (sockets), host (memory of one host's ranks), fake
// (no peers), and NCCL in the CUDA plugin (dist/device_backend.h); and the checker that compares the calls.

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "dist/device_backend.h"
#include "titan/core/error.h"

namespace titan::dist {

struct CallRecord;

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

struct GroupBackends {
  /// Connects to the members within the time limit; 0: that of the group's spec.
  using Make = std::function<BackendPtr(std::chrono::milliseconds limit)>;

  BackendPtr main;
  /// If device tensors have a backend of their own (NCCL): both are made at their first use, which is the same
  /// call on all members, because many groups carry only one kind of tensors. Empty if `main` takes both.
  Make make_main, make_host;
  BackendPtr host;
  bool main_is_on_host = false;         ///< `main` takes host memory only: device tensors are copied for it
  std::chrono::milliseconds timeout{};  ///< for a backend that is made later; 0: none was set

  c10d::Backend& for_tensor(const at::Tensor& tensor) {
    return on_host(tensor.defined() ? tensor.device() : c10::kCPU) ? made(host, make_host)
                                                                   : made(main, make_main);
  }
  bool on_host(c10::Device device) const { return make_host && device.is_cpu(); }

  /// `make`: may be empty if `backend` is there.
  c10d::Backend& made(BackendPtr& backend, const Make& make) const {
    if (!backend) backend = make(timeout);
    return *backend;
  }
};

/// Where gloo listens. Uses the interfaces if any are named, else the address.
struct GlooAddress {
  std::vector<std::string> interfaces;  ///< "eth0"; several: traffic is spread over them
  std::string address;  ///< host name or IP under which the others reach this process; "": its host name
};

/// The address of this host on the route to `host`, IPv4 if there is one, else IPv6; "" when there is none,
/// or none that other hosts can use (loopback, link-local). A host name often resolves to 127.0.1.1 on its
/// own host, which nobody else can reach.
std::string address_towards(const std::string& host);

/// `interfaces`: the value of GLOO_SOCKET_IFNAME. Without it, loopback when all ranks are on one host, else
/// this host's address on the route to `other_host`.
GlooAddress choose_gloo_address(const std::optional<std::string>& interfaces, bool one_host,
                                const std::string& other_host);

/// Groups over TCP sockets on the CPU, by the gloo inside LibTorch. Connects to all members (blocks). Threads
/// of the group end when the last reference goes.
BackendPtr make_gloo_group(const GroupSpec& spec, const GlooAddress& address);

/// Groups whose ranks are on one host and copy straight from each other's memory. Collective. `sockets`
/// (gloo, with the same ranks) carries send and receive. Returns null, on all ranks alike, where the kernel
/// or a container doesn't let the ranks read each other's memory.
BackendPtr make_host_group(const GroupSpec& spec, BackendPtr sockets);

/// A backend without peers: one process plays one rank of any world, for dry runs, layouts and cost
/// estimates. Every call is done at once. Data that would come from other ranks is made from this rank's own,
/// so that values stay finite: gathered parts are copies of its own part, reductions return its own part.
/// Takes meta tensors, too. `has_batches`: takes several calls at once, as NCCL does.
BackendPtr make_fake_group(int rank, int size, bool has_batches = false);

/// The calls that the ranks' main threads wait in, of all groups, in a store that all ranks read. One per
/// World. Ranks write to it only after a while, so it costs nothing when calls agree.
class WaitingCalls {
 public:
  WaitingCalls(c10::intrusive_ptr<c10d::Store> store, int world_rank)
      : store_(std::move(store)), rank_(world_rank) {}

  /// This rank's main thread has reached this collective of the call's group.
  void reach(const CallRecord& call);
  /// Shows the call to the other ranks, until withdraw() or the next call.
  void show(const CallRecord& call);
  void withdraw();
  /// The calls of other groups in which members of the call's group wait: "; rank 1 calls ... in group 'tp'
  /// of ranks 0, 1". With `only_for_me`: only calls that wait for this rank.
  std::string elsewhere(const CallRecord& call, bool only_for_me);
  int rank() const { return rank_; }

 private:
  c10::intrusive_ptr<c10d::Store> store_;
  int rank_;
  std::mutex mutex_;
  bool shown_ = false;
  std::map<std::string, uint64_t> num_reached_;  // this rank's collectives by group
};

/// Compares the members' calls before they start, so that ranks that have lost their common order get an
/// error instead of waiting for each other. One per group.
///
/// Collectives: every member gathers all members' calls on the host and compares them. So the error names a
/// member that makes another call of the same group. A rank that waits for longer than a second shows its
/// call to the others: two ranks that wait for each other in calls of different groups get an error at once,
/// and an error about a member that never comes says which call it waits in. Without the checker, ranks may
/// order calls of different groups differently if they wait later; with it they can't, because the gather
/// waits in each call.
/// Send and receive: the sender posts its call in the store and continues; the receiver compares when it
/// waits.
class CallChecker {
 public:
  /// `spec`: the group's, with a store of the checker's own. `ranks`: world ranks in group order.
  CallChecker(const GroupSpec& spec, std::vector<int> ranks, std::shared_ptr<WaitingCalls> waiting);

  void set_timeout(std::chrono::milliseconds timeout) { timeout_ms_ = timeout.count(); }

  /// Collective over the group. Throws Error that lists the calls if they differ.
  void check(const CallRecord& call, c10d::Backend& backend) const;

  void announce_sent(const CallRecord& call) const;
  /// Waits until the peer has posted its send. Throws Error with both calls if they differ.
  void check_received(const CallRecord& call) const;

 private:
  void wait_for_members(c10d::Work& gather, const CallRecord& call) const;
  void check_elsewhere(c10d::Work& gather, const CallRecord& call) const;
  std::string key_of(int from, int to, uint64_t sequence) const;

  c10::intrusive_ptr<c10d::Store> store_;
  int rank_;
  std::vector<int> ranks_;
  std::atomic<int64_t> timeout_ms_;
  std::shared_ptr<WaitingCalls> waiting_;
};

/// The first line of what(): LibTorch appends a stack trace.
inline std::string first_line_of(const std::exception& error) {
  const std::string text = reason_of(error);
  return text.substr(0, text.find('\n'));
}

}  // namespace titan::dist
