#pragma once

// How long the ranks of a job that fails need for their ends. Launchers wait for so long before they kill.

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>

#include "titan/dist/world.h"

namespace titan::dist {

/// From a rank's failure until it has told what that comes from, at most (Heartbeat::explain).
inline constexpr std::chrono::seconds kExplainsWithin{8};

/// From the verdict that the job hangs until a rank's watchdog has ended its process, at most.
inline constexpr std::chrono::seconds kHangEndsWithin{8};

/// In all: a job that has lost a rank, or hangs, is over by then.
inline constexpr std::chrono::seconds kJobEndsWithin{10};

// [Note: watchdog]
// A rank says what it is at, as it goes on: data, compute, checkpoint, validation. A thread of its own sees
// whether it does go on, and tells the other ranks through the job's store (a beat, some bytes each tenth of
// the shortest limit, two seconds at most). Signs of going on are:
//   progress()          a new phase, micro-batch, ...
//   a collective call   launched, or through with its wait
//   storage             read or written, while a rank loads data, loads or saves
//   processor time      on a CPU, where a rank that computes isn't one that hangs (computing_is_progress),
//   and
//                       elsewhere while it reads and writes; alone for ten limits at most
// A rank that has given none for longer than the limit of its kind is overdue; so is one whose beats stay
// away for compute's limit, whatever it was at: stopped, swapped out, or behind a broken network. Rank 0 sees
// all beats and comes to the verdict, which names the culprit: whoever is silent, before whoever isn't at a
// call of its peers, before the peers, which only wait. A rank that waits is excused while another one loads
// data, saves or validates within its own limit. Then every rank prints where all its threads are, its last
// calls and the verdict, and ends the process with kHungExitCode, whatever its other threads wait for. Where
// rank 0 is the one that is lost, the others see that its beats stay away, and do the same each by itself.
//
// Time in which a whole process stood still (a stopped job, a suspended machine) doesn't count for what it
// sees of itself and of others, and a rank under a debugger is never overdue.

class FlightDump;  // guard/flight_dump.h

/// What a rank is at. Idle has no limit.
enum class ProgressKind : uint8_t { Idle, Data, Compute, Checkpoint, Validation };

/// "idle", "data", "compute", "checkpoint", "validation"
const char* name_of(ProgressKind kind);

struct TimeLimit {
  std::chrono::milliseconds time{};
  std::string setting = {};  ///< which sets it, for messages: "comm.train_timeout_seconds"; may be empty
};

/// Of the time without any sign of going on.
struct WatchdogLimits {
  TimeLimit data{std::chrono::seconds(600)};
  TimeLimit compute{std::chrono::seconds(300)};
  TimeLimit checkpoint{std::chrono::seconds(1860)};
  TimeLimit validation{std::chrono::seconds(900)};

  const TimeLimit& of(ProgressKind kind) const;
};

/// With which a process ends that hangs, or whose peers do.
inline constexpr int kHungExitCode = 124;

struct WatchdogOptions {
  WatchdogLimits limits;
  /// Gets stacks_<rank>.txt when the job hangs; empty: they are only printed.
  std::filesystem::path folder = {};
  /// Writes this rank's flight record when the job hangs; null: its last calls are only printed.
  std::shared_ptr<FlightDump> flight = {};
  /// For a GPU false: the host spins while it waits.
  bool computing_is_progress = true;
  /// In place of printing and ending the process: called once, on the watchdog's thread, with the verdict.
  std::function<void(const std::string& verdict)> on_hang = {};
};

/// One per process and run, made by all ranks of the world in the same order of such calls. progress() may be
/// called by any one thread at a time and costs a few nanoseconds:
///
///   dist::Watchdog watchdog(world, {.limits = {.compute = {std::chrono::seconds(60)}}});
///   for (int64_t step = 1; step <= steps; ++step) {
///     watchdog.progress(dist::ProgressKind::Data, "batch", step);
///     auto batch = loader.next();
///     watchdog.progress(dist::ProgressKind::Compute, "step", step);
///     train(batch);
///   }
///
/// The time limits of collectives (InitOptions::timeout, World::set_timeout) go on by themselves: with longer
/// ones than these the watchdog speaks first, and knows more. On backend "fake" it does nothing.
class Watchdog {
 public:
  Watchdog(const World& world, WatchdogOptions options);
  /// Tells the other ranks that this one is watched no longer.
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  /// From now on this rank is at `kind`, which begins or goes on. `what` (a literal, or as long-lived)
  /// and `step` are for messages; -1: no step.
  void progress(ProgressKind kind, const char* what, int64_t step = -1);
  /// What was told last goes on.
  void progress();

  /// From now on: a first step may take longer than the later ones.
  void set_limits(const WatchdogLimits& limits);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace titan::dist
