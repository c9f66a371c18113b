#pragma once

// The meeting place of a group's ranks on one host: a small block of shared memory in which each rank posts
// its call and where its tensor is. The others copy from there with process_vm_readv: once, without sockets
// or staging buffers.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "dist/device_backend.h"

namespace titan::dist {

/// What a rank posts for one call. `op` and `bytes` must be equal on all ranks, or the call fails.
struct Posting {
  uint32_t op = 0;  ///< a CollectiveOp
  uint64_t bytes = 0;
  const void* address = nullptr;
};

class HostChannel {
 public:
  explicit HostChannel(const GroupSpec& spec);
  ~HostChannel();
  HostChannel(const HostChannel&) = delete;
  HostChannel& operator=(const HostChannel&) = delete;

  // The ranks find out by trying whether the kernel or container allows this: all of them attach(), agree
  // (over sockets) that all could, do the same for can_read(), and drop the channel otherwise.
  bool attach(c10d::Store& store);
  bool can_read();

  int rank() const { return rank_; }
  int size() const { return size_; }
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout.count(); }

  /// Begins the next call: the others may read `posting.address` until finish() returns.
  void post(const Posting& posting);
  /// Waits until `peer` is at this call too. Throws Error naming it when it doesn't come in time, has ended,
  /// gave up, or made another call.
  void meet(int peer);
  /// Copies `bytes` from `peer`'s tensor, `offset` bytes into it. Between meet(peer) and finish().
  void read(int peer, uint64_t offset, void* target, uint64_t bytes);
  /// Says that this rank is done reading, and waits until the others are.
  void finish();
  /// Tells the others that this rank makes no more calls.
  void give_up();

 private:
  struct Slot;
  struct Block;
  using Clock = std::chrono::steady_clock;

  Slot& slot(int rank) const;
  void ring() const;
  /// Waits until `value` of `peer` reaches this call's number.
  void wait_for(int peer, const std::atomic<uint64_t>& value, const char* what);
  [[noreturn]] void fail(int peer, const std::string& reason);
  void check_alive(int peer, const std::atomic<uint64_t>& value);

  const int rank_, size_;
  std::atomic<int64_t> timeout_;  // milliseconds
  Block* block_ = nullptr;
  size_t block_bytes_ = 0;
  int file_ = -1;  // rank 0's, until all have opened it
  uint64_t call_ = 0;
  Posting mine_;
  std::string broken_;  // after an error the ranks are out of step: every later call fails
};

}  // namespace titan::dist
