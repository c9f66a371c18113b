#include "titan/dist/flight_record.h"

#include <algorithm>
#include <array>
#include <chrono>

namespace titan::dist {
namespace {

int64_t now_ns() {
  using namespace std::chrono;
  return duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

}  // namespace

const char* name_of(CollectiveOp op) {
  static constexpr std::array names = {"all_gather", "reduce_scatter", "all_reduce", "broadcast",
                                       "all_to_all", "send",           "receive",    "barrier"};
  return names[static_cast<size_t>(op)];
}

uint64_t FlightRecorder::start(CallRecord call) {
  call.start_ns = now_ns();
  std::lock_guard lock(mutex_);
  call.number = next_++;
  ring_[call.number % ring_.size()] = call;
  return call.number;
}

void FlightRecorder::finish(uint64_t number, CallState state) {
  const int64_t end_ns = now_ns();
  std::lock_guard lock(mutex_);
  CallRecord& call = ring_[number % ring_.size()];
  if (call.number != number) return;  // a call that outlived a whole turn of the ring
  call.end_ns = end_ns;
  call.state = state;
}

std::vector<CallRecord> FlightRecorder::snapshot() const {
  std::lock_guard lock(mutex_);
  std::vector<CallRecord> calls;
  const uint64_t kept = std::min<uint64_t>(next_, ring_.size());
  for (uint64_t number = next_ - kept; number < next_; ++number)
    calls.push_back(ring_[number % ring_.size()]);
  return calls;
}

uint64_t FlightRecorder::num_calls() const {
  std::lock_guard lock(mutex_);
  return next_;
}

const char* FlightRecorder::intern(std::string_view text) {
  std::lock_guard lock(mutex_);
  return texts_.emplace(text).first->c_str();
}

}  // namespace titan::dist
