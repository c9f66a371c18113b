#pragma once

// Signals that ask a run to stop: SIGTERM, SIGINT (Ctrl-C), SIGUSR1 (SLURM's --signal) and SIGHUP (its
// terminal is gone), except those that the process was started to ignore.
//
// [Note: stopping]
//   note      a handler records the first signal; this rank continues with its step (SignalWatch)
//   publish   a thread puts it into the job's store, for a peer that waits for data (SignalListener)
//   agree     all ranks learn of it before the same step's forward (step_runner.h)
//   save      the state is saved unless it already is; then the run ends normally, with exit code 0 (except
//             if torchrun's agent stopped its ranks: src/cli/train.h)
//
// A second signal ends the process at once, with 128 + its number. A signal within 0.2 s of the first counts
// as the same one. So does any signal from the launcher, which may be late in forwarding one that this rank
// already received with its process group or SLURM step. To end ranks at once, the launcher sends SIGKILL.

#include <functional>
#include <string>

namespace titan::train {

/// The value that the launcher sends with a SIGTERM (sigqueue) to ranks that can't continue because a peer
/// has failed.
inline constexpr int kPeerHasFailed = 0x7174;
/// The same for ranks that will be restarted in a larger group.
inline constexpr int kGroupGrows = 0x7175;

/// Notes these signals as long as it lives, instead of their default actions. A process has one, which the
/// main thread makes before there are other threads: they inherit the blocked signals, which interrupt only
/// the watch's own thread, never a collective or a read.
class SignalWatch {
 public:
  /// `launcher_pid`: the launcher that forwards signals, which is this process's parent; 0: none.
  explicit SignalWatch(int launcher_pid = 0);
  ~SignalWatch();
  SignalWatch(const SignalWatch&) = delete;
  SignalWatch& operator=(const SignalWatch&) = delete;
};

/// The first signal that the watch has noted; 0: none, or there is no watch.
int noted_signal();
/// Whether it came with kPeerHasFailed.
bool peer_has_failed();
/// Whether it came with kGroupGrows: the launcher continues the job.
bool group_grows();
/// Whether it came from the launcher.
bool noted_by_launcher();

/// "SIGTERM"
std::string signal_name(int signal);

/// Calls `notify` with the signal when one is noted, from the watch's thread; at once if one was noted
/// before.
class SignalListener {
 public:
  explicit SignalListener(std::function<void(int)> notify);
  /// No call is in progress afterwards.
  ~SignalListener();
  SignalListener(const SignalListener&) = delete;
  SignalListener& operator=(const SignalListener&) = delete;

 private:
  std::function<void(int)> notify_;
};

}  // namespace titan::train
