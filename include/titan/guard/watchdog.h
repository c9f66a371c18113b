#pragma once

// [Note: watchdog]
// The watchdog finds out which rank of a job hangs or is lost, names it in one line that is the same on all
// ranks, and ends a job that hangs. Each rank has one, with its own threads:
//
//   watchdog thread   judges whether this rank makes progress, and sends what it found as a *beat*, about
//                     twice a second; receives the others' beats and judges those. It never blocks.
//   side threads      do what may block forever: one exchanges beats through the job's store, one writes
//                     files.
//
// A rank makes progress when it shows one of these signs:
//
//   progress()        a new phase, micro-batch, ...
//   a collective      launched, or done with its wait
//   storage           read or written, while the rank loads data, loads or saves a checkpoint
//   processor time    on a CPU, where a rank that computes doesn't hang (computing_is_progress); with a GPU
//                     only while it reads and writes. Without another sign it counts for ten limits at most.
//
// A rank without a sign for longer than the limit of its ProgressKind is overdue. So is a rank whose beats
// don't arrive for the limit of Compute, whatever it is doing: it is stopped, swapped out, or cut off by a
// broken network. Rank 0 receives all beats and reaches the verdict. It blames silent ranks first, then
// ranks that aren't in a call that their peers wait in, then the peers, which only wait. A rank that waits is
// excused while another one loads data, saves or validates within its own limit. Then every rank prints the
// stacks of all its threads, its last calls and the verdict, and ends the process with kHungExitCode,
// whatever its other threads are doing. When rank 0 itself is lost, the others notice that its beats don't
// arrive, and each does the same by itself.
//
// Time in which a whole process stood still (a stopped job, a suspended machine) doesn't count, and a rank
// under a debugger is never overdue.

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "titan/dist/world.h"

namespace titan::dist {

/// Longest time from a rank's failure until it has reported the cause (Watchdog::explain).
inline constexpr std::chrono::seconds kExplainsWithin{8};

/// Longest time from the verdict that the job hangs until a rank's watchdog has ended its process.
inline constexpr std::chrono::seconds kHangEndsWithin{8};

/// Longest time for all of it: a job that has lost a rank, or hangs, is over by then. Launchers wait this
/// long before they kill.
inline constexpr std::chrono::seconds kJobEndsWithin{10};

/// The exit code of a process that hangs, or whose peers do.
inline constexpr int kHungExitCode = 124;

/// The kind of work that a rank does. Idle has no limit.
enum class ProgressKind : uint8_t { Idle, Data, Compute, Checkpoint, Validation };

/// "idle", "data", "compute", "checkpoint", "validation"
const char* name_of(ProgressKind kind);

struct TimeLimit {
  std::chrono::milliseconds time{};
  /// The setting that it comes from, for messages: "comm.train_timeout_seconds"; may be empty.
  std::string setting = {};
};

/// How long a rank may go without any sign of progress.
struct WatchdogLimits {
  TimeLimit data{std::chrono::seconds(600)};
  TimeLimit compute{std::chrono::seconds(300)};
  TimeLimit checkpoint{std::chrono::seconds(1860)};
  TimeLimit validation{std::chrono::seconds(900)};

  const TimeLimit& of(ProgressKind kind) const;
};

struct WatchdogOptions {
  WatchdogLimits limits = {};
  /// False: nothing is judged until set_limits(). Lost ranks are named and records are written nevertheless.
  bool judges = true;
  /// Folder of stacks_<rank>.txt and flight records; empty: the stacks are only printed.
  std::filesystem::path folder = {};
  /// Writes this rank's last calls to <folder>/<record_prefix><rank>.json when any rank fails or hangs, when
  /// this one crashes or gets SIGQUIT, or when `titan debug dump` asks for it. Unset: never.
  std::optional<std::string> record_prefix = {};
  /// False for a GPU: its host spins while it waits.
  bool computing_is_progress = true;
  /// Called instead of printing and ending the process: once, on the watchdog's thread, with the verdict.
  std::function<void(const std::string& verdict)> on_hang = {};
};

/// Why a job failed, as Watchdog::explain finds out.
struct Explanation {
  /// One line, the same on all ranks that fail. The cause comes first.
  std::string text;
  /// The rank whose own error is the cause, and which reports it; -1: a rank is lost, or the cause isn't known.
  int told_by = -1;
  /// This rank's error adds nothing to `text`: it is part of it, or only says that a peer is gone.
  bool covers_own_error = false;
  /// This rank's error follows from a call that failed or was cut off, because a peer is lost. It may say
  /// anything, as the results of such a call hold no data.
  bool is_about_peer = false;
};

/// One per process and run, made by all ranks of the world in the same order. progress() may be called by any
/// one thread at a time and costs a few nanoseconds:
///
///   dist::Watchdog watchdog(world, {.limits = {.compute = {std::chrono::seconds(60)}}});
///   for (int64_t step = 1; step <= steps; ++step) {
///     watchdog.progress(dist::ProgressKind::Data, "batch", step);
///     auto batch = loader.next();
///     watchdog.progress(dist::ProgressKind::Compute, "step", step);
///     train(batch);
///   }
///
/// Collectives keep their own time limits (InitOptions::timeout, World::set_timeout). Make those longer than
/// these, so that the watchdog, which knows more, acts first. On backend "fake" it does nothing.
class Watchdog {
 public:
  Watchdog(const World& world, WatchdogOptions options);
  /// Reports to the other ranks that this one ends.
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  /// Reports that this rank begins work of this kind. `what` (a literal, or as long-lived) and `step` (-1:
  /// none) are for messages.
  void progress(ProgressKind kind, const char* what, int64_t step = -1);
  /// Reports progress of that work.
  void progress();

  /// Changes the limits, because a first step may take longer than later ones; starts to judge if that was
  /// off.
  void set_limits(const WatchdogLimits& limits);

  /// Reports that this rank's training is over, for whatever reason: from now on no rank judges it or waits
  /// for it.
  void leave();

  /// Returns why the job fails, given this rank's error: the lost rank with its host and last call; or else the
  /// first error that isn't about a peer (a full disk, a wrong setting); or else the result of the flight
  /// records. Makes all ranks write their records. Takes some seconds, because silence takes time to notice,
  /// and gives up after kExplainsWithin. Launchers blame the first rank to end, so it then returns a little
  /// later on ranks that aren't to blame. Doesn't throw. Leaves, as leave() does. Call it once, when
  /// the process is about to end.
  Explanation explain(const std::string& failure) noexcept;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace titan::dist
