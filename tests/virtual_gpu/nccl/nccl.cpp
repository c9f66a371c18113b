// NCCL's functions over shared memory. Calls are queued as operations on their streams, as NCCL's kernels are; the scheduler
// runs them, and they wait for other ranks without blocking other streams. Here are those that make, split and end communicators.

#include <nccl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "nccl/calls.h"

namespace virtual_gpu {

// For ncclGetLastError.
static thread_local const char* last_error_text = "";

ncclResult_t check_is_ready(const Communicator& c) {
  if (c.is_aborted()) return ncclRemoteError;
  if (c.state != ncclInProgress) return c.state;
  last_error_text = "a call with a communicator whose previous call is still ncclInProgress";
  return ncclInvalidArgument;
}

ncclResult_t check_is_member(const Communicator& c, int rank, const char* role) {
  if (rank >= 0 && rank < c.size()) return ncclSuccess;
  static thread_local std::string text;
  text = std::string(role) + " " + std::to_string(rank) + " of " + std::to_string(c.size()) + " ranks";
  last_error_text = text.c_str();
  return ncclInvalidArgument;
}

const CommunicatorPtr& communicator_of(ncclComm_t handle) {
  if (!handle->communicator)
    not_supported("a call with a communicator that was destroyed or aborted", "Mend the caller.");
  return handle->communicator;
}

// While a capture lasts, NCCL registers the buffers of the calls with the device's driver, which knows them by the piece that the first byte is in.
void check_can_be_recorded(const Operation& operation) {
  const char* registers = std::getenv("NCCL_GRAPH_REGISTER");
  if (registers && std::string_view(registers) == "0") return;
  for (const Range& range : operation.ranges)
    if (is_of_several_pieces(range.data, range.bytes))
      not_supported(
          "a recorded " + operation.name + " whose buffer has several pieces of the driver's memory",
          "NCCL registers the first one only: set NCCL_GRAPH_REGISTER=0.");
}

namespace {

std::atomic<int> num_communicators = 0;

// As NCCL does, but not forever. The limit is shorter in a test.
void wait_for_recordings(const char* call, const Communicator& c) {
  const char* limit = std::getenv("VIRTUAL_GPU_RECORDING_LIMIT_MS");
  const int most_ms = limit ? std::atoi(limit) : 20'000;
  for (int waited_ms = 0; c.num_recorded > 0; ++waited_ms) {
    if (waited_ms == most_ms)
      not_supported(std::string(call) + " while a recording has calls of the communicator",
                    "It waits until the recording is destroyed.");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
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
  const CommunicatorPtr c = end(handle);
  c->leave();
  wait_for_recordings("ncclCommDestroy", *c);
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
  wait_for_recordings("ncclCommAbort", *c);
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

}  // extern "C"
