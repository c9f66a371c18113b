#include "plan/outside_memory.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace titan::plan {

namespace {

// The driver hands out memory that is mapped for peers in such pieces.
constexpr int64_t kGranularity = int64_t{2} << 20;
int64_t in_pieces(int64_t bytes) { return (bytes + kGranularity - 1) / kGranularity * kGranularity; }

bool is_in_one_host(const std::vector<int>& ranks, int64_t host_devices) {
  return std::ranges::all_of(ranks,
                             [&](int rank) { return rank / host_devices == ranks.front() / host_devices; });
}

/// The calls of a communicator.
struct Use {
  bool has_collectives = false;
  std::set<int> senders, receivers;  ///< ranks at the other ends of messages
  bool is_limited = false;           ///< to kLinkChannels, for messages
  int64_t largest_send = 0;          ///< through symmetric memory
  int64_t num_pieces = 0, sends_of_piece = 0;
};

}  // namespace

OutsideMemory outside_memory(const Trace& trace, const ClusterSpec& cluster, SymmetricOwners owners) {
  OutsideMemory memory;
  if (cluster.device.is_cpu) return memory;
  std::map<int, Use> uses;
  for (const Collective& call : trace.collectives()) {
    if (call.group_size < 2) continue;
    const std::string& label = trace.name(call.label);
    const bool is_tensor = label.starts_with("tp::");
    const int num_pieces = is_tensor ? owners.tp : label.starts_with("context_parallel::") ? owners.cp : 0;
    Use& use = uses[call.communicator];
    if (num_pieces > 0 && call.peer >= 0 &&
        is_in_one_host(trace.members(call.communicator), cluster.host.devices)) {
      use.largest_send = std::max(use.largest_send, call.bytes);
      use.num_pieces = num_pieces;
      use.sends_of_piece = is_tensor ? call.group_size : 1;
    } else if (call.peer < 0) {
      use.has_collectives = true;
    } else {
      (trace.name(call.op) == "receive" ? use.senders : use.receivers).insert(call.peer);
      use.is_limited = !is_tensor;
    }
  }
  for (const auto& [communicator, use] : uses) {
    const auto size = static_cast<int64_t>(trace.members(communicator).size());
    const bool in_one_host = is_in_one_host(trace.members(communicator), cluster.host.devices);
    const int64_t of_ring = use.has_collectives ? kChannels * std::min<int64_t>(2, size - 1) : 0,
                  of_peer = use.is_limited ? kLinkChannels : kChannels,
                  received = of_ring + of_peer * static_cast<int64_t>(use.senders.size()),
                  sent = of_ring + of_peer * static_cast<int64_t>(use.receivers.size());
    if (received + sent > 0) ++memory.communicators;
    memory.nccl_bytes += in_one_host ? received * in_pieces(kBytesReceived) + sent * kGranularity
                                     : of_ring * (kBytesReceived + kBytesSent);
    memory.symmetric_bytes += use.num_pieces * in_pieces(use.largest_send * use.sends_of_piece);
  }
  return memory;
}

}  // namespace titan::plan
