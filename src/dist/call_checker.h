#pragma once

// Compares the members' calls before they start, so that ranks that have lost their common order get an error
// instead of waiting for each other. One per group.
//
// A collective: every member gathers what all of them are about to call, on the host, and compares. So a
// member that makes another call of the same group is named with it; one that makes no call of the group at
// all can't be seen here, and ends in a time-out. Ranks may order calls of different groups differently as
// long as they wait later; with the gather they can't, as each call then waits at once.
// Send and receive: the sender says through the store what it sends, and continues; the receiver compares
// when it waits.

#include <atomic>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "dist/device_backend.h"

namespace titan::dist {

struct CallRecord;

class CallChecker {
 public:
  /// `spec`: the group's, with a store of the checker's own. `ranks`: world ranks in group order.
  CallChecker(const GroupSpec& spec, std::vector<int> ranks);

  void set_timeout(std::chrono::milliseconds timeout) { timeout_ms_ = timeout.count(); }

  /// Collective over the group. Throws Error that lists the calls if they differ.
  void check(const CallRecord& call, c10d::Backend& backend) const;

  void announce_sent(const CallRecord& call) const;
  /// Waits until the peer has said what it sends.
  void check_received(const CallRecord& call) const;

 private:
  std::string key_of(int from, int to, uint64_t sequence) const;

  c10::intrusive_ptr<c10d::Store> store_;
  int rank_;
  std::vector<int> ranks_;
  std::atomic<int64_t> timeout_ms_;
};

}  // namespace titan::dist
