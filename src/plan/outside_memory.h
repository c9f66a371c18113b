#pragma once

// [Note: memory outside the allocator]
// What a device holds besides LibTorch's caching allocator's memory and a CUDA context: NCCL's buffers, and symmetric memory. Estimates, because NCCL
// decides how many channels it opens when it has seen the machine.
//
// NCCL. A rank has buffers for what each of its neighbors sends, on each channel, one for each protocol (computeBuffSizes in src/init.cc of
// NVIDIA/nccl 2.28.9): NCCL_BUFFSIZE, 4 MiB, for Simple; 4.7 MiB for LL128; 0.5 MiB for LL. Within a host these are mapped for the neighbor, in
// pieces of 2 MiB, and so is a piece for each channel to a neighbor (src/transport/p2p.cc). Between hosts a rank also has buffers for what it
// sends, of Simple and LL128 (sendProxyConnect in src/transport/net.cc). A communicator that makes collectives has kChannels channels, with two
// neighbors on each: a ring's and a tree's (one if it has two ranks). Messages of two ranks of a host have as many channels as the communicator,
// of which those for pipelines and rings have at most kLinkChannels (ncclTopoComputeP2pChannels in src/graph/paths.cc); messages between hosts
// share buffers of the whole rank, which aren't counted. Communicators of which nothing is called on the device don't exist, as PyTorch makes them
// at the first call. Those of NVLink's switches aren't counted.
//
// Symmetric memory, in place of which a plan has sends and receives. Asynchronous tensor parallelism has a piece that holds a summand of each rank of
// its group (exchanges.cpp); a ring that copies has one piece for keys and values and one for their gradients (distributed_attention.cpp). The largest
// message is such a summand, or such a piece.

#include <cstdint>

#include "plan/cluster.h"
#include "plan/trace.h"

namespace titan::plan {

/// An assumption: what NCCL's log often says of 8 GPUs with NVLink ("16 coll channels").
constexpr int64_t kChannels = 16;
constexpr int64_t kLinkChannels = 4;  ///< maxCTAs of src/cuda_plugin/nccl_groups.cpp
/// Buffers of one channel to one neighbor, and from it: the default of NCCL_BUFFSIZE, those of LL128, and of what is received LL's, too.
constexpr int64_t kBytesSent = (int64_t{4} << 20) + int64_t{120} * 640 * 8 * 8;
constexpr int64_t kBytesReceived = kBytesSent + int64_t{8} * 512 * 8 * 16;

struct OutsideMemory {
  int communicators = 0;
  int64_t nccl_bytes = 0;
  int64_t symmetric_bytes = 0;
  int64_t bytes() const { return nccl_bytes + symmetric_bytes; }
};

/// How many owners of symmetric memory a group has: one for each stage of the model. 0: the exchanges of such groups go through NCCL.
struct SymmetricOwners {
  int tp = 0, cp = 0;
};

/// Exchanges go through symmetric memory where a group is in one host.
OutsideMemory outside_memory(const Trace& trace, const ClusterSpec& cluster, SymmetricOwners owners);

}  // namespace titan::plan
