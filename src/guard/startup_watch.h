#pragma once

// Requests to stop while a run starts: during the rendezvous, while an index or a model is built. Nothing has
// been trained by then, so all ranks exit where they are.

#include <functional>
#include <memory>

#include "titan/dist/world.h"
#include "titan/train/run_end.h"

namespace titan::train {

/// Ends the process when the SignalWatch has noted a signal and the start takes more than five seconds from
/// then on (a shorter start reaches the first step's agreement). Once the ranks have met, all of them end:
/// each polls the job's store on a separate thread, and they wait for each other, so that no rank takes
/// another's end for a failure.
class StartupWatch {
 public:
  /// `on_end`: called before the process ends, when all ranks that have met know of it, with the cause, which
  /// is the same on all of them; not called when the launcher ends ranks because a peer has failed. Returns
  /// the exit code (0 without it). If it throws, the error is logged and the exit code is 1.
  explicit StartupWatch(std::function<int(const StopCause&)> on_end = {});
  ~StartupWatch();
  StartupWatch(const StartupWatch&) = delete;
  StartupWatch& operator=(const StartupWatch&) = delete;

  /// Call it when the ranks have met.
  void join(const dist::World& world);
  /// Call it when everything is built: from then on StopOnSignal handles signals. Returns on all ranks or on
  /// none. Collective over the world, if join() was called. A second call does nothing.
  void end();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace titan::train
