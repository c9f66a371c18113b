#pragma once

// [Note: device time]
// With NCCL a collective doesn't block the host, so only the device knows how long it worked and how long it
// stood still for other ranks. A StreamClock marks where a step begins and ends in the stream that computes,
// and PeerWaits mark, in between, where that stream waits for other ranks. The marks are events, which are
// read when the device has passed them, so the host never waits for a measurement.

#include <cstddef>
#include <memory>
#include <vector>

#include "dist/stream.h"
#include "dist/trace_range.h"

namespace titan::dist {

/// One step of a stream.
struct StreamStep {
  double idle_s = 0;    ///< since the end of the step before
  double span_s = 0;    ///< from its beginning to its end
  double waited_s = 0;  ///< part of span_s: standing still for other ranks
};

class StreamClock {
 public:
  /// From now on, and as long as it lives, PeerWaits count for this clock.
  StreamClock();
  ~StreamClock();
  StreamClock(const StreamClock&) = delete;
  StreamClock& operator=(const StreamClock&) = delete;

  /// Begins a step of the device's current stream. An earlier one that hasn't ended is dropped.
  void start(at::Device device);
  /// Ends it, if one has begun. Returns whether one had.
  bool stop();
  /// The steps that the device has finished since the last call, oldest first.
  std::vector<StreamStep> take();

 private:
  friend class PeerWait;
  struct State;
  std::shared_ptr<State> state_;
};

/// While it lives, its thread waits for other ranks, or tells its current stream to wait for them. Costs
/// nothing without a clock; other streams than the clock's, BackgroundCalls and recorded work don't count. A range of a
/// trace, "peer wait all_gather", says for which call: `what` is a CollectiveOp's name, or "peer memory".
class PeerWait {
 public:
  explicit PeerWait(const char* what);
  ~PeerWait();
  PeerWait(const PeerWait&) = delete;
  PeerWait& operator=(const PeerWait&) = delete;

 private:
  TraceRange range_;
  std::shared_ptr<StreamClock::State> clock_;  // null: it doesn't count
  size_t wait_ = 0;                            // its index in the step
};

}  // namespace titan::dist
