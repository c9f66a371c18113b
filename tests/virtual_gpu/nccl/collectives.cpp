// Collectives: in rounds, in which each rank puts a part of its bytes in its slot of the shared memory and takes what it needs from the
// others'. The ranks' calls and their buffers are compared first.

#include <nccl.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "nccl/calls.h"
#include "nccl/reduce.h"

namespace virtual_gpu {
namespace {

void copy_bytes(char* to, const char* from, size_t bytes) {
  if (to != from) std::memmove(to, from, bytes);
}

// NCCL asks that all ranks of a call pass registered memory, or none does, and at the same offsets; else it is undefined. In place, one buffer
// is this rank's part of the other, whose offset counts.
struct Buffer {
  const void* data = nullptr;
  size_t bytes = 0;
  const void* counts = nullptr;  ///< where the offset is taken
};

/// The arguments that must be equal on all ranks; what a function lacks is 0.
struct Terms {
  size_t count = 0;
  ncclDataType_t type = ncclInt8;
  ncclRedOp_t op = ncclSum;
  int root = 0;
};

struct RegisteredCalls {
  std::mutex mutex;
  std::map<std::string, std::array<uint64_t, 3>> by_name;  ///< calls with so many registered buffers
};
RegisteredCalls& registered_calls() {
  static auto& all = *new RegisteredCalls;
  return all;
}

Places places_of(const Communicator& c, const std::string& name, const Terms& terms,
                 const std::vector<Buffer>& buffers) {
  Places places{};
  places.num_buffers = static_cast<uint32_t>(buffers.size());
  // Each rank has its own factor, and its own number for it.
  std::snprintf(places.text, sizeof places.text, "%s of %zu elements of type %d, operation %d, root %d",
                name.c_str(), terms.count, terms.type, std::min<int>(terms.op, ncclNumOps), terms.root);
  places.calls = std::hash<std::string_view>()(places.text);
  for (const Buffer& buffer : buffers) {
    const auto offset = c.offset_of_registered(buffer.data, buffer.bytes);
    if (!offset) continue;
    ++places.num_registered;
    const size_t counted = *offset - static_cast<size_t>(static_cast<const char*>(buffer.data) -
                                                         static_cast<const char*>(buffer.counts));
    places.offsets = places.offsets * 1000003 + counted + 1;
  }
  const std::lock_guard lock(registered_calls().mutex);
  ++registered_calls().by_name[name][std::min<size_t>(places.num_registered, 2)];
  return places;
}

Places both(Places first, const Places& second) {
  first.calls = first.calls * 1000003 + second.calls;
  first.num_buffers += second.num_buffers;
  first.num_registered += second.num_registered;
  first.offsets = first.offsets * 1000003 + second.offsets;
  return first;
}

// When all ranks are in the operation.
void compare_places(const Communicator& c, const std::string& name) {
  const Places& mine = c.shared().places[c.rank()];
  for (int rank = 0; rank < c.size(); ++rank) {
    const Places& other = c.shared().places[rank];
    if (other.calls != mine.calls)
      not_supported("a communicator's operation where rank " + std::to_string(c.rank()) + " begins with " +
                        mine.text + ", and rank " + std::to_string(rank) + " with " + other.text + ",",
                    "NCCL asks that all ranks make the same calls, also within groups.");
    if (other.num_registered == mine.num_registered && other.offsets == mine.offsets) continue;
    not_supported(name + " where rank " + std::to_string(c.rank()) + " has " +
                      std::to_string(mine.num_registered) + " of " + std::to_string(mine.num_buffers) +
                      " buffers in registered memory, and rank " + std::to_string(rank) + " has " +
                      std::to_string(other.num_registered) +
                      (other.num_registered == mine.num_registered ? ", at other offsets," : ""),
                  "NCCL asks that all ranks register a call's buffers, at the same offsets, or none does.");
  }
}

// Called for each part of a round, when all ranks' parts are in their slots.
using Visit = std::function<void(size_t offset, size_t bytes)>;
struct Round {
  const char* source = nullptr;  ///< this rank's bytes; null if it has none
  size_t bytes = 0;
  Visit visit;  ///< may be empty
};
Task exchange(Turn turn, std::vector<Round> rounds, std::string name, Places places) {
  Communicator& c = *turn.communicator;
  const uint64_t ticket = turn.ticket;
  co_await until([&c, ticket] { return c.is_turn(ticket); });
  // A rank whose communicator was aborted doesn't arrive: the others may still wait in an earlier operation.
  if (c.is_aborted()) {
    c.finish(ticket);
    co_return;
  }
  c.shared().places[c.rank()] = places;
  bool is_compared = false;
  for (const Round& round : rounds) {
    for (size_t offset = 0; offset < round.bytes; offset += slot_bytes) {
      const size_t part = std::min(slot_bytes, round.bytes - offset);
      if (round.source) copy_bytes(c.shared().slots[c.rank()], round.source + offset, part);
      co_await until(c.arrive());
      if (c.is_aborted()) break;
      if (!std::exchange(is_compared, true)) compare_places(c, name);
      if (round.visit) round.visit(offset, part);
      co_await until(c.arrive());
      if (c.is_aborted()) break;
    }
    if (c.is_aborted()) break;
  }
  c.finish(ticket);
}

struct Collective {
  CommunicatorPtr communicator;
  cudaStream_t stream = nullptr;
  Operation operation;
  std::vector<Round> rounds;
  Places places{};
  std::vector<size_t> algorithms = {};
};
thread_local std::vector<Collective> grouped_collectives;

// NCCL chooses an algorithm by function and size, in a way of its own. Here, sizes of one algorithm differ by less than 16 times.
size_t algorithm_of(const std::string& function, size_t bytes) {
  static constexpr std::string_view functions[] = {"ncclAllReduce", "ncclReduce", "ncclBroadcast",
                                                   "ncclAllGather", "ncclReduceScatter"};
  constexpr size_t num_sizes = num_algorithms / 8;
  const auto found = std::ranges::find(functions, function);
  if (found == std::end(functions)) not_supported(function, "Add it to this list.");
  const auto of_size = static_cast<size_t>(std::bit_width(bytes)) / 4;
  return static_cast<size_t>(found - functions) * num_sizes + std::min(of_size, num_sizes - 1);
}

ncclResult_t queue(Collective collective) {
  const auto& [c, stream, operation, rounds, places, algorithms] = collective;
  if (c->is_aborted()) return ncclRemoteError;
  size_t largest = 0;
  for (const Range& range : operation.ranges) largest = std::max(largest, range.bytes);
  if (is_left_out(largest)) {
    collective.operation.begin = computation("", {}, [] {}).begin;
  } else {
    set_task(collective.operation, c, stream,
             [rounds = rounds, name = operation.name, places = places](const Turn& turn) {
               return exchange(turn, rounds, name, places);
             });
  }
  return submit(stream, std::move(collective.operation)) ? ncclUnhandledCudaError : ncclSuccess;
}

// In strict mode: NCCL connects a communicator's ranks when a collective is the first with its algorithm, and the calls of all end when that is
// done (`ncclCollPreconnect` in its group.cc).
ncclResult_t connect_and_queue(const CommunicatorPtr& c, std::vector<Collective> collectives) {
  const auto queue_all = [](const std::vector<Collective>& all) {
    ncclResult_t result = ncclSuccess;
    for (const Collective& collective : all)
      if (result == ncclSuccess) result = queue(collective);
    return result;
  };
  const auto is_connected = [&c](const Collective& collective) {
    return std::ranges::all_of(collective.algorithms,
                               [&c](size_t algorithm) { return c->is_connected(algorithm); });
  };
  if (!is_strict() || std::ranges::all_of(collectives, is_connected)) return queue_all(collectives);
  return run_waiting(c, [c, queue_all, collectives = std::move(collectives)] {
    for (const Collective& collective : collectives)
      for (const size_t algorithm : collective.algorithms) c->wait_for_algorithm(algorithm);
    return queue_all(collectives);
  });
}

ncclResult_t submit_all(std::vector<Collective> collectives) {
  std::vector<std::vector<Collective>> by_communicator;
  for (Collective& next : collectives) {
    if (is_strict())
      for (const size_t algorithm : next.algorithms) next.communicator->announce_algorithm(algorithm);
    auto mine = std::ranges::find(by_communicator, next.communicator,
                                  [](const auto& of_one) { return of_one.front().communicator; });
    if (mine == by_communicator.end()) mine = by_communicator.emplace(mine);
    mine->push_back(std::move(next));
  }
  ncclResult_t result = ncclSuccess;
  for (std::vector<Collective>& of_one : by_communicator)
    if (result == ncclSuccess || result == ncclInProgress) {
      const CommunicatorPtr c = of_one.front().communicator;
      if (const ncclResult_t of_this = connect_and_queue(c, std::move(of_one)); of_this != ncclSuccess)
        result = of_this;
    }
  return result;
}

ncclResult_t submit_exchange(Collective collective, const Terms& terms, const std::vector<Buffer>& buffers) {
  const Communicator& c = *collective.communicator;
  if (const ncclResult_t error = check_is_ready(c)) return error;
  if (const ncclResult_t error = check_is_member(c, terms.root, "root")) return error;
  collective.places = places_of(c, collective.operation.name, terms, buffers);
  collective.algorithms = {algorithm_of(collective.operation.name, terms.count * bytes_of(terms.type))};
  if (!is_in_group()) return submit_all({std::move(collective)});
  grouped_collectives.push_back(std::move(collective));
  return ncclSuccess;
}

Reduction reduction_of(const CommunicatorPtr& c, ncclRedOp_t op) {
  return {op, op >= ncclNumOps ? c->factors[static_cast<size_t>(op - ncclNumOps)] : 1.0};
}

Visit reduce_into(const CommunicatorPtr& c, char* to, ncclDataType_t type, Reduction reduction) {
  return [c, to, type, reduction](size_t offset, size_t bytes) {
    const char* sources[max_ranks];
    for (int rank = 0; rank < c->size(); ++rank) sources[rank] = c->shared().slots[rank];
    reduce(type, reduction, sources, c->size(), to + offset, bytes / bytes_of(type));
  };
}

}  // namespace

// A group's collectives of one communicator and stream are one launch.
ncclResult_t submit_grouped_collectives() {
  std::vector<Collective> merged;
  for (Collective& next : std::exchange(grouped_collectives, {})) {
    if (merged.empty() || merged.back().communicator != next.communicator ||
        merged.back().stream != next.stream) {
      merged.push_back(std::move(next));
      continue;
    }
    auto& ranges = merged.back().operation.ranges;
    ranges.insert(ranges.end(), next.operation.ranges.begin(), next.operation.ranges.end());
    merged.back().rounds.insert(merged.back().rounds.end(), next.rounds.begin(), next.rounds.end());
    merged.back().places = both(merged.back().places, next.places);
    merged.back().algorithms.push_back(next.algorithms.front());
  }
  return submit_all(std::move(merged));
}

}  // namespace virtual_gpu

using namespace virtual_gpu;

extern "C" {

/// For tests: how many calls of NCCL's function passed `count` (0, 1 or 2) buffers in registered memory.
uint64_t virtual_gpu_registered_calls(const char* name, int count) {
  const std::lock_guard lock(registered_calls().mutex);
  return registered_calls().by_name[name].at(static_cast<size_t>(count));
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* factor, ncclDataType_t type,
                                      ncclScalarResidence_t, ncclComm_t handle) {
  std::vector<double>& factors = communicator_of(handle)->factors;
  factors.push_back(scalar_from(type, factor));
  *op = static_cast<ncclRedOp_t>(ncclNumOps + factors.size() - 1);
  return ncclSuccess;
}
ncclResult_t ncclRedOpDestroy(ncclRedOp_t, ncclComm_t) { return ncclSuccess; }

ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t handle, cudaStream_t stream) {
  const CommunicatorPtr& c = communicator_of(handle);
  const size_t bytes = count * bytes_of(type);
  return submit_exchange({c,
                          stream,
                          {"ncclAllReduce", {{from, bytes, false}, {to, bytes, true}}, {}},
                          {{static_cast<const char*>(from), bytes,
                            reduce_into(c, static_cast<char*>(to), type, reduction_of(c, op))}}},
                         {count, type, op}, {{from, bytes, from}, {to, bytes, to}});
}
ncclResult_t ncclReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                        int root, ncclComm_t handle, cudaStream_t stream) {
  const CommunicatorPtr& c = communicator_of(handle);
  const size_t bytes = count * bytes_of(type);
  const bool is_root = c->rank() == root;
  Operation operation{"ncclReduce", {{from, bytes, false}}, {}};
  if (is_root) operation.ranges.push_back({to, bytes, true});
  Visit visit;
  if (is_root) visit = reduce_into(c, static_cast<char*>(to), type, reduction_of(c, op));
  return submit_exchange({c, stream, operation, {{static_cast<const char*>(from), bytes, visit}}},
                         {count, type, op, root}, {{from, bytes, from}});
}
ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root,
                           ncclComm_t handle, cudaStream_t stream) {
  const CommunicatorPtr& c = communicator_of(handle);
  const size_t bytes = count * bytes_of(type);
  Operation operation{"ncclBroadcast", {{to, bytes, true}}, {}};
  if (c->rank() == root) operation.ranges.push_back({from, bytes, false});
  const Visit take = [c, root, to](size_t offset, size_t part) {
    copy_bytes(static_cast<char*>(to) + offset, c->shared().slots[root], part);
  };
  const char* source = c->rank() == root ? static_cast<const char*>(from) : nullptr;
  return submit_exchange({c, stream, operation, {{source, bytes, take}}},
                         {.count = count, .type = type, .root = root}, {{to, bytes, to}});
}
ncclResult_t ncclBcast(void* data, size_t count, ncclDataType_t type, int root, ncclComm_t handle,
                       cudaStream_t stream) {
  return ncclBroadcast(data, data, count, type, root, handle, stream);
}
ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t handle,
                           cudaStream_t stream) {
  const CommunicatorPtr& c = communicator_of(handle);
  const size_t bytes = count * bytes_of(type);
  const Visit take = [c, to, bytes](size_t offset, size_t part) {
    for (int rank = 0; rank < c->size(); ++rank)
      copy_bytes(static_cast<char*>(to) + static_cast<size_t>(rank) * bytes + offset, c->shared().slots[rank],
                 part);
  };
  const size_t all_bytes = bytes * static_cast<size_t>(c->size());
  const bool is_in_place = from == static_cast<const char*>(to) + static_cast<size_t>(c->rank()) * bytes;
  return submit_exchange({c,
                          stream,
                          {"ncclAllGather", {{from, bytes, false}, {to, all_bytes, true}}, {}},
                          {{static_cast<const char*>(from), bytes, take}}},
                         {count, type}, {{from, bytes, is_in_place ? to : from}, {to, all_bytes, to}});
}
ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t handle, cudaStream_t stream) {
  const CommunicatorPtr& c = communicator_of(handle);
  const size_t bytes = count * bytes_of(type);
  std::vector<Round> rounds;
  for (int rank = 0; rank < c->size(); ++rank) {
    Round round{static_cast<const char*>(from) + static_cast<size_t>(rank) * bytes, bytes, {}};
    if (rank == c->rank()) round.visit = reduce_into(c, static_cast<char*>(to), type, reduction_of(c, op));
    rounds.push_back(std::move(round));
  }
  const size_t all_bytes = bytes * static_cast<size_t>(c->size());
  const bool is_in_place = to == static_cast<const char*>(from) + static_cast<size_t>(c->rank()) * bytes;
  return submit_exchange({c,
                          stream,
                          {"ncclReduceScatter", {{from, all_bytes, false}, {to, bytes, true}}, {}},
                          std::move(rounds)},
                         {count, type, op}, {{from, all_bytes, from}, {to, bytes, is_in_place ? from : to}});
}

}  // extern "C"
