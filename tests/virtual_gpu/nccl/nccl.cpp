// NCCL's functions over shared memory. Calls are queued as operations on their streams, as NCCL's kernels are; the scheduler
// runs them, and they wait for other ranks without blocking other streams.

#include <nccl.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "nccl/communicator.h"
#include "nccl/reduce.h"
#include "nccl/task.h"
#include "runtime/virtual_gpu.h"

namespace virtual_gpu {
namespace {

using CommunicatorPtr = std::shared_ptr<Communicator>;

// In memory-only mode only counts and checks are sent, which the program looks at.
bool is_left_out(size_t bytes) { return !computes() && bytes > small_bytes; }

void copy_bytes(char* to, const char* from, size_t bytes) {
  if (to != from) std::memmove(to, from, bytes);
}

// The ticket is taken when the host submits the call; a captured call takes one when the host launches the graph.
struct Turn {
  CommunicatorPtr communicator;
  uint64_t ticket = 0;
};

// The operation runs the task that `make` makes of a turn.
template <class MakeTask>
void set_task(Operation& operation, const CommunicatorPtr& c, cudaStream_t stream, MakeTask make) {
  const auto begin = [c, make] {
    return begin_task([turn = Turn{c, c->take_ticket()}, make] { return make(turn); });
  };
  if (is_capturing(stream))
    operation.begin_at_launch = begin;
  else
    operation.begin = begin();
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

// For ncclGetLastError.
thread_local const char* last_error_text = "";

// NCCL refuses calls with a communicator that it is still making or connecting.
ncclResult_t check_is_ready(const Communicator& c) {
  if (c.is_aborted()) return ncclRemoteError;
  if (c.state != ncclInProgress) return c.state;
  last_error_text = "a call with a communicator whose previous call is still ncclInProgress";
  return ncclInvalidArgument;
}

// The rank is a call's root or peer.
ncclResult_t check_is_member(const Communicator& c, int rank, const char* role) {
  if (rank >= 0 && rank < c.size()) return ncclSuccess;
  static thread_local std::string text;
  text = std::string(role) + " " + std::to_string(rank) + " of " + std::to_string(c.size()) + " ranks";
  last_error_text = text.c_str();
  return ncclInvalidArgument;
}

// Runs work that waits for other ranks: in this call, or, if the communicator doesn't block, beside it.
template <class Work>
ncclResult_t run_waiting(const CommunicatorPtr& c, Work work) {
  if (c->blocks) return work();
  c->state = ncclInProgress;
  int device = 0;
  cudaGetDevice(&device);
  std::thread([c, work, device] {
    cudaSetDevice(device);
    c->state = work();
  }).detach();
  return ncclInProgress;
}

thread_local int group_depth = 0;

struct Collective {
  CommunicatorPtr communicator;
  cudaStream_t stream = nullptr;
  Operation operation;
  std::vector<Round> rounds;
  Places places{};
};
thread_local std::vector<Collective> grouped_collectives;

ncclResult_t submit_now(Collective collective) {
  const auto& [c, stream, operation, rounds, places] = collective;
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
  }
  ncclResult_t result = ncclSuccess;
  for (Collective& collective : merged)
    if (result == ncclSuccess) result = submit_now(std::move(collective));
  return result;
}

ncclResult_t submit_exchange(Collective collective, const Terms& terms, const std::vector<Buffer>& buffers) {
  const Communicator& c = *collective.communicator;
  if (const ncclResult_t error = check_is_ready(c)) return error;
  if (const ncclResult_t error = check_is_member(c, terms.root, "root")) return error;
  collective.places = places_of(c, collective.operation.name, terms, buffers);
  if (group_depth == 0) return submit_now(std::move(collective));
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

// ---- point to point, and groups of calls

struct Transfer {
  CommunicatorPtr communicator;
  int peer = 0;
  char* data = nullptr;
  size_t bytes = 0;
  bool is_send = false;
  cudaStream_t stream = nullptr;

  int sender() const { return is_send ? communicator->rank() : peer; }
  int receiver() const { return is_send ? peer : communicator->rank(); }
  Mailbox& mailbox() const { return communicator->shared().mailboxes[sender()][receiver()]; }
  bool is_connected() const {
    return peer == communicator->rank() || communicator->is_connected(sender(), receiver());
  }
};

thread_local std::vector<Transfer> grouped;

// Moves what can be moved now. Transfers with the same peer and direction follow one another.
bool move_parts(const std::vector<Transfer>& transfers, std::vector<size_t>& num_moved) {
  bool all_done = true;
  std::vector<std::pair<int, bool>> busy;
  for (size_t i = 0; i < transfers.size(); ++i) {
    const Transfer& t = transfers[i];
    if (num_moved[i] == t.bytes) continue;
    all_done = false;
    const std::pair direction(t.peer, t.is_send);
    if (std::ranges::find(busy, direction) != busy.end()) continue;
    busy.push_back(direction);
    Mailbox& mailbox = t.mailbox();
    const uint32_t in_transit = mailbox.num_sent - mailbox.num_received;
    if (in_transit == (t.is_send ? num_steps : 0)) continue;
    const size_t part = std::min(step_bytes, t.bytes - num_moved[i]);
    char* data = t.data + num_moved[i];
    auto& step = mailbox.steps[(t.is_send ? mailbox.num_sent : mailbox.num_received) % num_steps];
    if (t.is_send) {
      step.message_bytes = t.bytes;
      std::memcpy(step.data, data, part);
      ++mailbox.num_sent;
    } else {
      if (step.message_bytes != t.bytes)
        not_supported("a message of " + std::to_string(step.message_bytes) + " bytes from rank " +
                          std::to_string(t.sender()) + " where rank " + std::to_string(t.receiver()) +
                          " receives " + std::to_string(t.bytes),
                      "NCCL asks that both counts are equal.");
      std::memcpy(data, step.data, part);
      ++mailbox.num_received;
    }
    num_moved[i] += part;
  }
  return all_done;
}

Task move_all(Turn turn, std::vector<Transfer> transfers) {
  Communicator& c = *turn.communicator;
  const uint64_t ticket = turn.ticket;
  co_await until([&c, ticket] { return c.is_turn(ticket); });
  std::vector<size_t> num_moved(transfers.size());
  co_await until([&] { return move_parts(transfers, num_moved) || c.is_aborted(); });
  c.finish(ticket);
}

// One operation moves all transfers of a communicator, on the first one's stream; other streams wait for it.
ncclResult_t queue_transfers(const CommunicatorPtr& c, const std::vector<Transfer>& transfers) {
  if (c->is_aborted()) return ncclRemoteError;
  const cudaStream_t stream = transfers.front().stream;
  std::vector<Transfer> moved;
  std::vector<cudaStream_t> other_streams;
  Operation operation;
  bool sends = false;
  bool receives = false;
  for (const Transfer& t : transfers) {
    operation.ranges.push_back({t.data, t.bytes, !t.is_send});
    (t.is_send ? sends : receives) = true;
    if (t.stream != stream && std::ranges::find(other_streams, t.stream) == other_streams.end())
      other_streams.push_back(t.stream);
    if (!is_left_out(t.bytes)) moved.push_back(t);
  }
  operation.name = sends && receives ? "ncclSend and ncclRecv" : sends ? "ncclSend" : "ncclRecv";
  cudaEvent_t event = nullptr;
  cudaEventCreate(&event);
  for (cudaStream_t other : other_streams) {
    cudaEventRecord(event, other);
    cudaStreamWaitEvent(stream, event, 0);
  }
  set_task(operation, c, stream, [moved](const Turn& turn) { return move_all(turn, moved); });
  const cudaError_t error = submit(stream, std::move(operation));
  for (cudaStream_t other : other_streams) {
    cudaEventRecord(event, stream);
    cudaStreamWaitEvent(other, event, 0);
  }
  cudaEventDestroy(event);
  return error ? ncclUnhandledCudaError : ncclSuccess;
}

// In strict mode: NCCL connects two ranks when one first sends to the other, and the calls of both end when that is done.
ncclResult_t connect_and_queue(const CommunicatorPtr& c, const std::vector<Transfer>& transfers) {
  if (!is_strict() || std::ranges::all_of(transfers, &Transfer::is_connected))
    return queue_transfers(c, transfers);
  return run_waiting(c, [c, transfers] {
    for (const Transfer& t : transfers)
      if (!t.is_connected()) c->wait_for_connection(t.sender(), t.receiver());
    return queue_transfers(c, transfers);
  });
}

ncclResult_t submit_group() {
  const std::vector<Transfer> transfers = std::exchange(grouped, {});
  ncclResult_t result = submit_grouped_collectives();
  std::vector<std::pair<CommunicatorPtr, std::vector<Transfer>>> by_communicator;
  for (const Transfer& t : transfers) {
    if (is_strict()) t.communicator->announce_connection(t.sender(), t.receiver());
    auto mine =
        std::ranges::find(by_communicator, t.communicator, [](const auto& entry) { return entry.first; });
    if (mine == by_communicator.end()) mine = by_communicator.insert(mine, {t.communicator, {}});
    mine->second.push_back(t);
  }
  for (const auto& [c, mine] : by_communicator)
    if (result == ncclSuccess || result == ncclInProgress)
      if (const ncclResult_t of_this = connect_and_queue(c, mine); of_this != ncclSuccess) result = of_this;
  return result;
}

ncclResult_t transfer(Transfer t) {
  if (const ncclResult_t error = check_is_ready(*t.communicator)) return error;
  if (const ncclResult_t error = check_is_member(*t.communicator, t.peer, "peer")) return error;
  grouped.push_back(std::move(t));
  return group_depth > 0 ? ncclSuccess : submit_group();
}

// ---- communicators

std::atomic<int> num_communicators = 0;

const CommunicatorPtr& communicator_of(ncclComm_t handle) {
  if (!handle->communicator)
    not_supported("a call with a communicator that was destroyed or aborted", "Mend the caller.");
  return handle->communicator;
}
// A handle's memory isn't freed, so that a later use of it is found.
CommunicatorPtr end(ncclComm_t handle) {
  communicator_of(handle)->forget_registered();
  return std::exchange(handle->communicator, nullptr);
}

void note_use(const CommunicatorPtr& c, const ncclConfig_t* config) {
  ++num_communicators;
  count_call("communicator");
  if (config && config->maxCTAs != NCCL_CONFIG_UNDEF_INT)
    count_call("communicator of at most " + std::to_string(config->maxCTAs) + " CTAs");
  if (config && config->blocking != NCCL_CONFIG_UNDEF_INT) c->blocks = config->blocking != 0;
}

ncclResult_t make(ncclComm_t* handle, const std::string& name, int rank, int size,
                  const ncclConfig_t* config) {
  CommunicatorPtr c = Communicator::open(name, rank, size);
  if (!c) return ncclSystemError;
  note_use(c, config);
  *handle = new ncclComm{c};
  return run_waiting(c, [c] { return c->connect() ? ncclSuccess : ncclRemoteError; });
}

// The ranks of the same color, ordered by key; what ncclCommSplit documents.
struct Part {
  int rank = 0;
  int size = 0;
};
std::optional<Part> split(Communicator& c, int color, int key) {
  auto& given = c.shared().splits;
  given[c.rank()] = {color, key};
  if (!c.host_barrier()) return std::nullopt;
  std::vector<std::pair<int, int>> members;
  for (int rank = 0; rank < c.size(); ++rank)
    if (given[rank].color == color) members.emplace_back(given[rank].key, rank);
  if (!c.host_barrier()) return std::nullopt;
  std::ranges::sort(members);
  const auto self = std::ranges::find(members, std::pair(key, c.rank()));
  return Part{static_cast<int>(self - members.begin()), static_cast<int>(members.size())};
}

}  // namespace
}  // namespace virtual_gpu

using namespace virtual_gpu;

extern "C" {

/// For tests.
int virtual_gpu_num_communicators() { return num_communicators; }
int virtual_gpu_num_registrations() { return num_registrations(); }
/// For tests: how many calls of NCCL's function passed `count` (0, 1 or 2) buffers in registered memory.
uint64_t virtual_gpu_registered_calls(const char* name, int count) {
  const std::lock_guard lock(registered_calls().mutex);
  return registered_calls().by_name[name].at(static_cast<size_t>(count));
}

ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::random_device random;
  *id = {};
  std::snprintf(id->internal, sizeof id->internal, "/virtual_gpu_%08x%08x%08x", random(), random(), random());
  return ncclSuccess;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* handle, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  return make(handle, id.internal, rank, size, config);
}
ncclResult_t ncclCommInitRank(ncclComm_t* handle, int size, ncclUniqueId id, int rank) {
  return make(handle, id.internal, rank, size, nullptr);
}
ncclResult_t ncclCommInitRankScalable(ncclComm_t* handle, int size, int rank, int, ncclUniqueId* ids,
                                      ncclConfig_t* config) {
  return make(handle, ids[0].internal, rank, size, config);
}
// It is the parent that waits; it has made the new communicator when it is ready again.
ncclResult_t ncclCommSplit(ncclComm_t handle, int color, int key, ncclComm_t* out, ncclConfig_t* config) {
  const CommunicatorPtr c = communicator_of(handle);
  *out = nullptr;
  if (const ncclResult_t error = check_is_ready(*c)) return error;
  if (color < 0 && color != NCCL_SPLIT_NOCOLOR) return ncclInvalidArgument;
  const std::string name = c->name() + "_" + std::to_string(c->num_splits++) + "_" + std::to_string(color);
  const std::optional<ncclConfig_t> given = config ? std::optional(*config) : std::nullopt;
  return run_waiting(c, [=] {
    const std::optional<Part> part = split(*c, color, key);
    if (!part) return ncclRemoteError;
    if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
    const CommunicatorPtr child = Communicator::open(name, part->rank, part->size);
    if (!child) return ncclSystemError;
    child->blocks = c->blocks;
    note_use(child, given ? &*given : nullptr);
    if (!child->connect()) return ncclRemoteError;
    *out = new ncclComm{child};
    return ncclSuccess;
  });
}
// Called by the ranks that stay, which needn't hear of the others.
ncclResult_t ncclCommShrink(ncclComm_t handle, int* excluded, int num_excluded, ncclComm_t* out,
                            ncclConfig_t* config, int flags) {
  Communicator& c = *communicator_of(handle);
  const auto is_excluded = [&](int rank) { return std::count(excluded, excluded + num_excluded, rank) > 0; };
  if (num_excluded <= 0 || is_excluded(c.rank())) return ncclInvalidArgument;
  if (flags & NCCL_SHRINK_ABORT) c.abort();
  const std::string name = c.name() + "_" + std::to_string(c.num_splits++) + "_shrunk";
  int rank = 0, size = 0;
  for (int i = 0; i < c.size(); ++i) {
    if (i == c.rank()) rank = size;
    if (!is_excluded(i)) ++size;
  }
  return make(out, name, rank, size, config);
}
// All ranks are in this process.
ncclResult_t ncclCommInitAll(ncclComm_t* handles, int size, const int*) {
  ncclUniqueId id;
  ncclGetUniqueId(&id);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < size; ++rank)
    ranks.emplace_back([=] { make(&handles[rank], id.internal, rank, size, nullptr); });
  for (std::thread& rank : ranks) rank.join();
  return ncclSuccess;
}
// Queued operations keep what they need, and end without the handle.
ncclResult_t ncclCommDestroy(ncclComm_t handle) {
  end(handle)->leave();
  return ncclSuccess;
}
ncclResult_t ncclCommFinalize(ncclComm_t handle) {
  const CommunicatorPtr c = communicator_of(handle);
  if (const ncclResult_t error = check_is_ready(*c)) return error;
  return run_waiting(c, [c] { return c->wait_for_operations() ? ncclSuccess : ncclRemoteError; });
}
ncclResult_t ncclCommAbort(ncclComm_t handle) {
  if (!handle) return ncclSuccess;
  const CommunicatorPtr c = end(handle);
  c->leave();
  c->abort();
  return ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t* error) {
  const Communicator& c = *communicator_of(handle);
  // Over a network, NCCL's proxy sees that a peer's connection has ended; within a host, nothing does.
  static const char* const reports = std::getenv("VIRTUAL_GPU_NCCL_ERRORS");
  const bool is_lost = reports && std::string_view(reports) == "1" && c.has_lost_peer();
  *error = c.is_aborted() || is_lost ? ncclRemoteError : c.state.load();
  return ncclSuccess;
}
ncclResult_t ncclCommCount(const ncclComm_t handle, int* count) {
  *count = communicator_of(handle)->size();
  return ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t handle, int* rank) {
  *rank = communicator_of(handle)->rank();
  return ncclSuccess;
}
// The handle is the address.
ncclResult_t ncclCommRegister(const ncclComm_t handle, void* address, size_t bytes, void** registered) {
  communicator_of(handle)->add_registered(address, bytes);
  count_call("ncclCommRegister");
  *registered = address;
  return ncclSuccess;
}
ncclResult_t ncclCommDeregister(const ncclComm_t handle, void* registered) {
  return communicator_of(handle)->remove_registered(registered) ? ncclSuccess : ncclInvalidUsage;
}
ncclResult_t ncclMemAlloc(void** address, size_t bytes) {
  return cudaMalloc(address, bytes) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}
ncclResult_t ncclMemFree(void* address) {
  if (is_registered(address))
    not_supported("ncclMemFree of memory that is registered with a communicator",
                  "Call ncclCommDeregister first.");
  return cudaFree(address) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error";
    case ncclSystemError:
      return "unhandled system error";
    case ncclInvalidArgument:
      return "invalid argument";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclInProgress:
      return "NCCL operation in progress";
    default:
      return "error of the virtual NCCL";
  }
}
const char* ncclGetLastError(ncclComm_t) { return last_error_text; }

ncclResult_t ncclGroupStart() {
  ++group_depth;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() { return --group_depth == 0 ? submit_group() : ncclSuccess; }

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
ncclResult_t ncclSend(const void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t handle,
                      cudaStream_t stream) {
  auto* bytes = static_cast<char*>(const_cast<void*>(data));
  return transfer({communicator_of(handle), peer, bytes, count * bytes_of(type), true, stream});
}
ncclResult_t ncclRecv(void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t handle,
                      cudaStream_t stream) {
  return transfer(
      {communicator_of(handle), peer, static_cast<char*>(data), count * bytes_of(type), false, stream});
}
ncclResult_t ncclAlltoAll(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t handle,
                          cudaStream_t stream) {
  const size_t bytes = count * bytes_of(type);
  ncclGroupStart();
  for (int rank = 0; rank < communicator_of(handle)->size(); ++rank) {
    const size_t offset = static_cast<size_t>(rank) * bytes;
    ncclSend(static_cast<const char*>(from) + offset, bytes, ncclInt8, rank, handle, stream);
    ncclRecv(static_cast<char*>(to) + offset, bytes, ncclInt8, rank, handle, stream);
  }
  return ncclGroupEnd();
}

}  // extern "C"
