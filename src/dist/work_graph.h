#pragma once

// [Note: work graphs]
// Device work that is the same each time can be recorded once and then launched as a whole, which takes the
// host some microseconds however many kernels it has (a CUDA graph). A recording holds addresses and numbers:
// what it reads must be at the same place at each launch, and what the host computes is computed only once.
//
// The recording belongs to one stream. Another stream takes part by waiting for an event of it, and needs a
// name (name_stream): the first stream waits for the named ones at the end, and before each launch. So an event
// from before the recording is also before every launch, and a wait for it is left out. An event of the
// recording is over, for everyone else, when the last launch is.
//
// Collectives of a recording reach their peers only when it is launched, so the flight recorder gets them then.

#include <functional>
#include <memory>

#include <c10/core/Device.h>

#include "dist/stream.h"

namespace titan::dist {

struct DeviceCall;

class WorkGraph {
 public:
  /// `device`: a GPU. Graphs share their memory, except for tensors that somebody still refers to.
  explicit WorkGraph(at::Device device);
  ~WorkGraph();
  WorkGraph(const WorkGraph&) = delete;
  WorkGraph& operator=(const WorkGraph&) = delete;

  /// Calls `queue` and records the device work that it queues on the current stream, which must not be the
  /// default one, on this thread and on autograd's. Nothing runs yet. Throws Error if `queue` does anything that can't
  /// be recorded (it waits for the device, reads a number, takes memory from the driver), after which no other graph can
  /// be recorded; otherwise what `queue` throws. One at a time in a process.
  void record(const std::function<void()>& queue);
  /// Queues the recorded work on the current stream.
  void launch();

  /// Whether work on this thread's current stream of `device` is being recorded.
  static bool records(at::Device device);
  /// Called at each launch; `ask` says when the launch is over.
  using Repeat = std::function<void(const std::function<DeviceCall()>& ask)>;
  /// Adds to the recording in progress.
  static void add(Repeat repeat);

 private:
  void join_streams();

  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace titan::dist
