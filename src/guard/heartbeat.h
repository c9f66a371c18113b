#pragma once

// Signs of life: a thread of each rank says through the job's store, about twice a second, that its process
// is there, what it is at, and what its last call was. A rank that is gone without a word (SIGKILL, a lost
// host) can so still be named by the others, with its host and its last call.
//
// The flight record is written when another rank fails, or when somebody asks for it: `titan debug dump RUN`
// leaves a file kFlightRequest in the records' folder, which rank 0 passes on to all. A thread of its own
// touches that folder: beats come where its file system hangs, too.

#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include "guard/flight_dump.h"
#include "titan/dist/world.h"

namespace titan::dist {

inline constexpr const char* kFlightRequest = "dump_request";

class Heartbeat {
 public:
  /// `dump`: null where no records are kept.
  Heartbeat(const World& world, std::shared_ptr<FlightDump> dump);
  ~Heartbeat();
  Heartbeat(const Heartbeat&) = delete;
  Heartbeat& operator=(const Heartbeat&) = delete;

  /// What this rank's failure comes from, as one line that is the same on all ranks that fail: which rank is
  /// lost, its host and its last call; else what the flight records say; and what the first rank to fail
  /// said. Takes some seconds, as silence takes time to notice, and writes all ranks' records on the way.
  /// Doesn't throw, and gives up after kExplainsWithin (end_limits.h) where the store hangs. To be called
  /// once, where the process is about to end.
  std::string explain(const std::string& failure) noexcept;

 private:
  class Impl;
  std::shared_ptr<Impl> impl_;  // shared with threads that may hang in the store for longer than this lives
  std::thread thread_;
};

/// Touches the folder of the flight records for a thread that must not hang where its file system does.
class DumpThread {
 public:
  /// `finds_requests`: look twice a second for the file kFlightRequest (heartbeat.h), and remove it.
  DumpThread(std::shared_ptr<FlightDump> dump, bool finds_requests);
  /// Leaves the thread to itself where it doesn't come back within a second.
  ~DumpThread();
  DumpThread(const DumpThread&) = delete;
  DumpThread& operator=(const DumpThread&) = delete;

  /// Soon writes this rank's record, in place of one that is asked for and not begun yet.
  void write(const std::string& reason, FlightExtent extent);
  /// Until what was asked for is written; false: not within `limit`.
  bool wait(std::chrono::milliseconds limit);
  /// Whether a request was found since the last call.
  bool take_request();

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace titan::dist
