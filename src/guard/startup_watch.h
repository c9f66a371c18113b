#pragma once

// Requests to stop while a run starts: in the rendezvous, while an index is built, a model is made. Nothing
// is trained by then, so all ranks end where they are.

#include <functional>
#include <memory>

#include "titan/dist/world.h"
#include "titan/train/run_end.h"

namespace titan::train {

/// Ends the process where the SignalWatch has noted a signal and the start takes more than
/// five seconds from then on (a short one comes to the first step's agreement by itself). So it does on all
/// ranks, once they have met: each looks into the job's store, by a thread of its own, and they wait for each
/// other, so that none takes another's end for a failure.
class StartupWatch {
 public:
  /// `on_end`: called before the process ends, when all ranks that have met have heard of it, with what it
  /// ends for, the same on all of them; not where the launcher ends ranks because a peer has failed. What it
  /// returns is the exit code, which is 0 without it; where it throws, the error is logged, and it is 1.
  explicit StartupWatch(std::function<int(const StopCause&)> on_end = {});
  ~StartupWatch();
  StartupWatch(const StartupWatch&) = delete;
  StartupWatch& operator=(const StartupWatch&) = delete;

  /// The ranks have met.
  void join(const dist::World& world);
  /// All is built: behind it a signal is StopAgreement's. Returns on all ranks or on none. Collective over
  /// the world where that was joined. Does nothing the second time.
  void end();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace titan::train
