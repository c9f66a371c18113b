#pragma once

#include <chrono>
#include <memory>

#include "titan/dist/flight_record.h"

namespace titan::dist {

/// Asks twice a second which calls devices are done with (FlightRecorder::sweep), on a thread of its own: a
/// driver in trouble may keep it for ever, and then keeps nobody else.
class DeviceSweep {
 public:
  explicit DeviceSweep(std::shared_ptr<FlightRecorder> recorder,
                       std::chrono::milliseconds period = std::chrono::milliseconds(500));
  /// Leaves the thread to itself where it doesn't come back within a second.
  ~DeviceSweep();
  DeviceSweep(const DeviceSweep&) = delete;
  DeviceSweep& operator=(const DeviceSweep&) = delete;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace titan::dist
