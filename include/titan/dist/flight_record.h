#pragma once

// The ring of a rank's last collective calls. Entries are of fixed size and written in place, so that
// recording costs some tens of nanoseconds and no allocation; readers take a copy (at a time-out or a crash).

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include <c10/core/ScalarType.h>

namespace titan::dist {

enum class CollectiveOp : uint8_t {
  AllGather,
  ReduceScatter,
  AllReduce,
  Broadcast,
  AllToAll,
  Send,
  Receive,
  Barrier
};

/// "all_gather", ...
const char* name_of(CollectiveOp op);

enum class CallState : uint8_t { Launched, Finished, Failed };

/// One call. The strings live as long as the recorder (group) or the process (labels).
struct CallRecord {
  uint64_t number = 0;        ///< of this rank's calls, from 0
  uint64_t group_number = 0;  ///< of this group's calls, from 0: equal on all its members for the same call
  const char* group = "";
  const char* phase = "";
  const char* module = "";
  int64_t bytes = 0;     ///< of the larger of input and output
  int64_t start_ns = 0;  ///< steady clock
  int64_t end_ns = 0;    ///< when wait() returned; 0 while launched
  int peer = -1;         ///< send, receive: group rank of the other side; broadcast: the root
  CollectiveOp op{};
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  CallState state = CallState::Launched;
};

/// Thread-safe. One per World, shared by its groups.
class FlightRecorder {
 public:
  explicit FlightRecorder(size_t capacity = 2048) : ring_(capacity) {}

  /// Fills in `number` and `start_ns`; returns the number, to be handed to finish().
  uint64_t start(CallRecord call);
  void finish(uint64_t number, CallState state);

  /// The calls still in the ring, oldest first.
  std::vector<CallRecord> snapshot() const;
  uint64_t num_calls() const;

  /// A copy of `text` that lives as long as the recorder.
  const char* intern(std::string_view text);

 private:
  mutable std::mutex mutex_;
  std::vector<CallRecord> ring_;
  uint64_t next_ = 0;
  std::set<std::string, std::less<>> texts_;
};

}  // namespace titan::dist
