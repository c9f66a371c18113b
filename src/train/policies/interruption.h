#pragma once

// Signals that ask a run to stop: SIGTERM, SIGINT (Ctrl-C), SIGUSR1 (SLURM's --signal) and SIGHUP (its
// terminal is gone), but those that the process was started to ignore.
//
// [Note: stopping]
//   note    a handler writes down the first signal; this rank continues with its step (SignalWatch)
//   tell    a thread puts it into the job's store, for a peer that waits for data (SignalListener)
//   agree   all ranks hear of it before the same step's forward (step_runner.h)
//   save    what isn't saved yet, once; then the run ends as one that is through, with exit code 0 (but where
//           torchrun's agent stopped its ranks: src/cli/train.h)
//
// A second signal ends the process at once, with 128 + its number. A signal within 0.2 s of the first
// counts as the same one. So does any signal from the launcher, which may forward, late, one that this rank got
// already with its process group or SLURM step. To end ranks at once the launcher sends SIGKILL.

#include <functional>
#include <string>

namespace titan::train {

/// The value that the launcher sends with a SIGTERM (sigqueue) to ranks that can't continue because a peer
/// has failed.
inline constexpr int kPeerHasFailed = 0x7174;
/// The same for ranks that are to be started again in a larger group.
inline constexpr int kGroupGrows = 0x7175;

/// Notes these signals as long as it lives, in place of what they do. A process has one. The main thread makes
/// it before there are other threads: these then inherit the blocked signals, which interrupt only the watch's
/// own thread, never a collective or a read.
class SignalWatch {
 public:
  /// `launcher_pid`: of the launcher that passes signals on, which is this process's parent; 0: there is
  /// none.
  explicit SignalWatch(int launcher_pid = 0);
  ~SignalWatch();
  SignalWatch(const SignalWatch&) = delete;
  SignalWatch& operator=(const SignalWatch&) = delete;
};

/// The first signal that the watch has noted; 0: none, or there is no watch.
int noted_signal();
/// Whether that one came as kPeerHasFailed.
bool peer_has_failed();
/// Whether it came as kGroupGrows: the launcher continues the job.
bool group_grows();
/// Whether it came from the launcher.
bool noted_by_launcher();

/// "SIGTERM"
std::string signal_name(int signal);

/// Calls `tell` with the signal when one is noted, from the watch's thread; at once if one was noted before.
class SignalListener {
 public:
  explicit SignalListener(std::function<void(int)> tell);
  /// No call is in progress afterwards.
  ~SignalListener();
  SignalListener(const SignalListener&) = delete;
  SignalListener& operator=(const SignalListener&) = delete;

 private:
  std::function<void(int)> tell_;
};

}  // namespace titan::train
