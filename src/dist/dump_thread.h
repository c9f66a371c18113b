#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "titan/dist/flight_dump.h"

namespace titan::dist {

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
