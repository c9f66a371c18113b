// Messages from one rank to another, and groups of calls.

#include <nccl.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "nccl/calls.h"
#include "nccl/reduce.h"

namespace virtual_gpu {
namespace {

thread_local int group_depth = 0;

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

// Whether a send lasts until its message is received, as one that is larger than NCCL's buffers does.
bool are_all_large() {
  static const char* const mode = std::getenv("VIRTUAL_GPU_NCCL_BUFFERS");
  return mode && std::string_view(mode) == "0";
}

// Moves what can be moved now. Transfers with the same peer and direction follow one another.
bool move_parts(const std::vector<Transfer>& transfers, std::vector<size_t>& num_moved,
                std::vector<uint32_t>& last_part) {
  bool all_done = true;
  std::vector<std::pair<int, bool>> busy;
  for (size_t i = 0; i < transfers.size(); ++i) {
    const Transfer& t = transfers[i];
    Mailbox& mailbox = t.mailbox();
    const bool has_moved = num_moved[i] == t.bytes;
    const bool is_received =
        !t.is_send || t.bytes == 0 || static_cast<int32_t>(mailbox.num_received - last_part[i]) >= 0;
    if (has_moved && (is_received || !are_all_large())) continue;
    all_done = false;
    const std::pair direction(t.peer, t.is_send);
    if (has_moved || std::ranges::find(busy, direction) != busy.end()) continue;
    busy.push_back(direction);
    const uint32_t in_transit = mailbox.num_sent - mailbox.num_received;
    if (in_transit == (t.is_send ? num_steps : 0)) continue;
    const size_t part = std::min(step_bytes, t.bytes - num_moved[i]);
    char* data = t.data + num_moved[i];
    auto& step = mailbox.steps[(t.is_send ? mailbox.num_sent : mailbox.num_received) % num_steps];
    if (t.is_send) {
      step.message_bytes = t.bytes;
      std::memcpy(step.data, data, part);
      last_part[i] = ++mailbox.num_sent;
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
  std::vector<uint32_t> last_part(transfers.size());
  co_await until([&] { return move_parts(transfers, num_moved, last_part) || c.is_aborted(); });
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
  return is_in_group() ? ncclSuccess : submit_group();
}

}  // namespace

bool is_in_group() { return group_depth > 0; }

}  // namespace virtual_gpu

using namespace virtual_gpu;

extern "C" {

ncclResult_t ncclGroupStart() {
  ++group_depth;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() { return --group_depth == 0 ? submit_group() : ncclSuccess; }

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
