#pragma once

// State shared by the sharded groups of one model. CommContext keeps the order of their collectives,
// prefetches and overlaps them; BufferPool reuses their communication buffers, so that from the third step on none takes
// memory from the device.

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <vector>

#include <ATen/core/Tensor.h>

#include "dist/device_backend.h"
#include "dist/stream.h"
#include "titan/dist/collectives.h"

namespace titan {
class DelayedGradients;
}

namespace titan::fsdp {

/// Gives out one-dimensional tensors of bytes on one device. Forward and backward of a model take turns; on a
/// GPU, the allocator takes idle buffers from any thread when the device has little memory left.
///
/// [Note: home of buffers]
/// LibTorch's allocator keeps free memory for each stream, and doesn't use one stream's for another. So all buffers come
/// from the stream that is current when the pool is made, the one that computes: whoever needs one next, and every
/// activation, can have the memory of one that was given back. A recording begins on the same stream.
///
/// A buffer that this stream used last is given back to the allocator at once, whether or not the device has come that far.
/// Buffers that other streams used last, those of reductions, stay until this stream has waited for the last reduction of a
/// backward. So each step begins with the same blocks in use, makes the same requests and gets the same addresses: from the
/// third one on, none takes memory from a device that keeps up with its host. (When buffers stayed until the allocator needed
/// them, they came to lie elsewhere in each step, until one step found no gap that was large enough.)
class BufferPool {
 public:
  explicit BufferPool(at::Device device);
  /// Blocks until all streams have finished with the buffers, because the allocator knows only one stream. While an
  /// error unwinds, gives up the memory of those in use instead.
  ~BufferPool();

  /// A buffer of `numel` elements of `dtype`. `user` waits for the stream that used it last, and so may write
  /// it at once.
  at::Tensor acquire(int64_t numel, at::ScalarType dtype, const dist::Stream& user);
  /// Takes a buffer back. Its next user waits for the work that `last_user` has queued so far.
  void release(at::Tensor buffer, const dist::Stream& last_user);

  /// Gives back buffers that haven't been used for many forwards: those of the first steps, or of a
  /// validation.
  void begin_forward();
  /// The stream on which buffers are allocated waits for the current one. On a GPU, unless they are registered, it waits for the
  /// last users of idle buffers, too, and gives these back.
  void hand_over();
  /// Waits for the users of idle buffers and takes these out. Buffers of a recording in progress stay.
  std::vector<at::Tensor> take_idle();

  /// From now on, buffers are registered with the groups that are added to this memory ([Note: registered memory]), and
  /// stay until the pool ends. Throws Error if the device's backend has no such memory.
  dist::RegisteredMemory& use_registered();
  bool is_registered() const { return registered_ != nullptr; }
  /// New memory for `bytes`, registered if the buffers are.
  at::Tensor new_bytes(int64_t bytes) const;

  int64_t num_allocations() const { return num_allocations_; }

 private:
  struct Free {
    at::Tensor bytes;
    dist::Event used;
    int64_t forward;  // in which it was released
  };
  at::Tensor take_fitting(int64_t bytes, const dist::Stream& user);
  at::Tensor new_buffer(int64_t bytes, const dist::Stream& user);
  std::vector<at::Tensor> take_if(const std::function<bool(const Free&)>& wanted);

  at::Device device_;
  std::unique_ptr<dist::RegisteredMemory> registered_;  // null: buffers aren't
  dist::Stream home_;                                   // [Note: home of buffers]
  std::mutex mutex_;  // guards the list; no memory is allocated or freed under it
  std::vector<Free> free_;
  int64_t num_forwards_ = 0;
  int64_t num_allocations_ = 0;
  std::optional<dist::IdleMemory> idle_;  // if the allocator keeps free memory, and buffers aren't registered
};

/// Gives up buffers that `work`, a call on `stream`, and the current stream may still use: their memory is
/// free when both are done. Doesn't block. A CPU's work owns its buffers.
void leave_stream(dist::Work& work, const dist::Stream& stream, at::ArrayRef<at::Tensor> buffers);

// The state that groups below one root share: streams, buffers, and the order in which collectives are
// issued.

class ParamGroup;

/// [Note: order of collectives]
/// Every rank has to issue the same collectives in the same order, even if ranks use different parameters.
/// A root forward records its visits to groups. The next forward gathers in the order of that list, and the
/// backward reduces in its reverse. A backward reaches the groups in the reverse of the order in which their
/// forwards ended, and gathers in that order. (The two orders differ where a group encloses others: the
/// outermost module's own group, or an embedding with the output that is tied to it.) A visit that a rank's
/// backward skips is still gathered and reduced, in its turn, as soon as the backward reaches one that ran
/// before it. The forward alone decides which visits
/// take part: those with an output that requires a gradient. (If a group runs several times in one forward,
/// all ranks' backwards have to reach the same runs; if it has several modules, all ranks' forwards have to
/// end with the same one.) Gathers and reductions use separate process groups, but the order between them is
/// the same on all ranks, too: a host that waits in one of them, because its queue of launches is full or
/// launches block, never issues the other.
class CommContext : public std::enable_shared_from_this<CommContext> {
 public:
  explicit CommContext(at::Device device);
  ~CommContext();

  /// Begins the root's forward: keeps the last forward's order for prefetching and, if gradients are
  /// recorded, clears its visits. Drops the remains of a backward that ended in an exception.
  void begin_forward();
  /// Ends the root's forward: frees unused prefetches before the optimizer can write the shards.
  void end_forward();
  /// Called when a group is about to run: gathers it, waits, and starts the gathers of the groups that came
  /// next last time, or of those that its list names. Returns the visit's number, or -1 if no gradients are recorded.
  int64_t visit(const std::shared_ptr<ParamGroup>& group);
  /// Called when the forward of the visit's group, or of one of its modules, ends with an output that
  /// requires a gradient, so the visit will have a backward.
  void expect_backward(int64_t visit);
  /// For a visit none of whose inputs requires a gradient: the end of its backward is unknown, so it is
  /// reduced after all others.
  void reduce_at_end(int64_t visit) { visits_[static_cast<size_t>(visit)].at_end = true; }
  /// Called when the gradient of the visit's output has arrived: gathers its parameters again if the backward
  /// reads them.
  void pre_backward(int64_t iteration, int64_t visit);
  /// Called when the gradients of the visit's inputs are complete: frees the parameters and queues the
  /// reduction.
  void post_backward(int64_t iteration, int64_t visit);

  /// Index of the current gradient-recording forward.
  int64_t iteration() const { return iteration_; }
  /// Number of forwards so far.
  int64_t num_forwards() const { return num_forwards_; }
  /// Adds a group, in registration order. Groups live as long as their context.
  void add_group(ParamGroup* group) { groups_.push_back(group); }
  void remove_group(ParamGroup* group);
  const std::vector<ParamGroup*>& groups() const { return groups_; }
  /// Drops gradients that were collected but never reduced, after an abandoned step.
  void discard_gradients();
  /// Called if a group's shards are in host memory ([Note: host shards]).
  void expect_host_shards() { host_shards_ = true; }
  void set_last_micro_batch(bool last) { last_micro_batch_ = last; }

  // ---- driven by a schedule's actions instead of by visits (ScheduledSharding)
  void become_scheduled();
  bool scheduled() const { return scheduled_; }
  void unshard();
  void wait_unsharded();
  void reshard();
  /// Starts the reductions that haven't started yet.
  void reduce();
  void finish_reduce();
  /// Whether the forward in progress is the one whose backward is the last before reduce().
  void set_last_forward(bool last);
  bool last_forward() const { return last_forward_; }
  /// A group's part of that backward begins with its module's output, and ends with its input.
  void expect_end(const ParamGroup& group) { ++unfinished_[&group]; }
  void end_of_backward(const ParamGroup& group);
  /// A rank whose backward didn't reach some groups reduces them now, because others have.
  void end_last_backward();
  /// The group's gradients of this step have all been collected: reduces it, if those before it in the order are done.
  void complete(const ParamGroup& group);
  /// Drops what an unfinished step has gathered and collected.
  void abandon_step() { abandon_backward(); }
  void set_delayed(DelayedGradients* queue) { delayed_ = queue; }
  DelayedGradients* delayed() const { return delayed_; }

  // One stream for gathers and one for reductions, so that both overlap the computation. On CPUs they are
  // empty; the process group's threads provide the overlap.
  dist::Stream gather_stream;
  dist::Stream reduce_stream;
  BufferPool pool;

  /// Groups whose parameters are gathered or being gathered: now, and the maximum since reset.
  int64_t num_gathered = 0;
  int64_t max_gathered = 0;
  void count_gathered(int64_t change);

 private:
  struct Visit {
    std::shared_ptr<ParamGroup> group;
    bool with_backward = false;
    bool at_end = false;
    bool ready = false;    // its gradients are complete
    bool skipped = false;  // this rank's backward has passed it without reaching it
    int64_t end = 0;       // its index in ends_
  };

  void prefetch_forward();
  int64_t prefetched_by(int64_t turn) const;
  bool runs_before(int64_t later, int64_t turn) const;
  ParamGroup& checked(const ParamGroup& now, ParamGroup& listed) const;
  void cancel_prefetches();
  void start_backward();
  void abandon_backward();
  void issue_gather();
  void gather_ahead(int64_t turn);
  void issue_ready_reductions();
  void skip_to(int64_t turn, int64_t visit);
  void issue_reduction(ParamGroup& group);
  void issue_last_reductions();
  void advance_reductions(size_t num_young);
  void finish_backward();
  void wait_for_copies() const;
  void hand_over();
  void reduce_next();
  void forget_reductions();

  std::vector<ParamGroup*> groups_;
  std::vector<Visit> visits_;
  std::vector<int64_t> ends_;  // visits with a backward, in the order of their forwards' ends
  std::vector<ParamGroup*> order_, previous_order_;  // visits of this forward and of the previous one
  std::deque<ParamGroup*> reducing_;                 // oldest first
  int64_t iteration_ = 0;
  int64_t num_forwards_ = 0;
  int64_t next_gather_ = -1;  // backward: index in ends_ of the next visit to gather
  int64_t next_reduce_ = -1;  // backward: the next visit to reduce
  int64_t reached_ = 0;       // backward: the lowest index in ends_ that it has reached
  bool in_backward_ = false;
  bool host_shards_ = false;
  bool last_micro_batch_ = true;
  bool scheduled_ = false;
  bool last_forward_ = false;
  std::map<const ParamGroup*, int> unfinished_;  // runs in the last forward whose backwards haven't ended
  std::set<const ParamGroup*> complete_;
  size_t num_reduced_ = 0;  // groups whose reductions have started, from the last one on
  DelayedGradients* delayed_ = nullptr;
};

}  // namespace titan::fsdp
