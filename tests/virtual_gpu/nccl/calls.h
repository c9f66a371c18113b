#pragma once

#include <nccl.h>

#include <cstdint>
#include <memory>
#include <thread>
#include <utility>

#include "nccl/communicator.h"
#include "nccl/task.h"
#include "runtime/virtual_gpu.h"

/// Shared by NCCL's functions: the checks of a call, and how it becomes an operation of its stream.
namespace virtual_gpu {

using CommunicatorPtr = std::shared_ptr<Communicator>;

const CommunicatorPtr& communicator_of(ncclComm_t handle);
/// NCCL refuses calls with a communicator that it is still making or connecting.
ncclResult_t check_is_ready(const Communicator& c);
/// The rank is a call's root or peer.
ncclResult_t check_is_member(const Communicator& c, int rank, const char* role);

/// In memory-only mode only counts and checks are sent, which the program looks at.
inline bool is_left_out(size_t bytes) { return !computes() && bytes > small_bytes; }

/// The ticket is taken when the host submits the call; a captured call takes one when the host launches the graph.
struct Turn {
  CommunicatorPtr communicator;
  uint64_t ticket = 0;
};

/// A call of a communicator in a recording. While it lives, the communicator can't end.
class RecordedCall {
 public:
  explicit RecordedCall(CommunicatorPtr c) : communicator_(std::move(c)) { ++communicator_->num_recorded; }
  ~RecordedCall() { --communicator_->num_recorded; }
  RecordedCall(const RecordedCall&) = delete;
  RecordedCall& operator=(const RecordedCall&) = delete;

 private:
  CommunicatorPtr communicator_;
};
/// Ends the program if NCCL would register memory for the recorded call that it can't.
void check_can_be_recorded(const Operation& operation);

/// The operation runs the task that `make` makes of a turn.
template <class MakeTask>
void set_task(Operation& operation, const CommunicatorPtr& c, cudaStream_t stream, MakeTask make) {
  const auto begin = [c, make] {
    return begin_task([turn = Turn{c, c->take_ticket()}, make] { return make(turn); });
  };
  if (is_capturing(stream)) {
    check_can_be_recorded(operation);
    operation.begin_at_launch = [begin, call = std::make_shared<RecordedCall>(c)] { return begin(); };
  } else {
    operation.begin = begin();
  }
}

/// Runs work that waits for other ranks: in this call, or, if the communicator doesn't block, beside it.
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

/// Whether the calling thread is between ncclGroupStart and ncclGroupEnd, which submits what is called meanwhile.
bool is_in_group();
ncclResult_t submit_grouped_collectives();

}  // namespace virtual_gpu
