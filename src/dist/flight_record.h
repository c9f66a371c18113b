#pragma once

// The flight recorder: a rank's last collective calls, in a ring of slots of fixed size. Recording and
// reading take no lock and allocate nothing, so that a signal handler can read while other threads record
// (guard/flight_dump.h). Recording costs some tens of nanoseconds.

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <vector>

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

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
/// Send and receive: between two ranks of the group.
inline bool is_point_to_point(CollectiveOp op) {
  return op == CollectiveOp::Send || op == CollectiveOp::Receive;
}

/// How far a call is. On a CPU: Launched, Waiting, then Finished or Failed. On a GPU, wait() only orders the
/// call before later work of the device: Launched, Ordered, and Finished once sweep() finds it done.
enum class CallState : uint8_t { Launched, Waiting, Ordered, Finished, Failed };

/// "launched", ...
const char* name_of(CallState state);
inline bool has_ended(CallState state) { return state == CallState::Finished || state == CallState::Failed; }

/// Sizes of a tensor. If it has more dims than are kept, the first ones are multiplied.
struct CallSizes {
  static constexpr size_t kMaxDims = 4;
  std::array<int64_t, kMaxDims> dims{};
  int64_t num_dims = -1;  ///< -1: there is no tensor
  void set(c10::IntArrayRef sizes);
  bool operator==(const CallSizes&) const = default;
};

/// The recorder's description of a group.
struct GroupRecord {
  std::string name;
  std::string purpose;     ///< groups of the same ranks with other purposes number their calls separately
  std::vector<int> ranks;  ///< world ranks
  int index = 0;           ///< position among this recorder's groups
  const GroupRecord* previous = nullptr;
};

/// One call. Texts are copies: a label may be gone when the ring is read.
struct CallRecord {
  uint64_t number = 0;  ///< position among this rank's calls, from 0
  /// Number among the group's collectives, from 0: equal on all members for the same call. Send and receive:
  /// number among those from the sender to the receiver.
  uint64_t sequence = 0;
  const GroupRecord* group = nullptr;  ///< lives as long as the recorder
  char phase[32] = "";
  char module[48] = "";
  CallSizes out, in;
  int64_t bytes = 0;      ///< the larger of input and output
  int64_t start_ns = 0;   ///< steady clock
  int64_t end_ns = 0;     ///< when it was found finished or failed; 0 before
  int64_t device_ns = 0;  ///< how long a device ran it, waits for peers included; 0: unknown
  int32_t peer = -1;      ///< send, receive: group rank of the other side; broadcast: the root
  /// Tensors of these sizes in one call. If their sizes differ, they are listed as one tensor of all elements.
  int32_t num_tensors = 1;
  CollectiveOp op{};
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  CallState state = CallState::Launched;
  int8_t reduce = -1;       ///< all_reduce: a ReduceOp
  bool background = false;  ///< from a background thread (BackgroundCalls)

  /// Cuts off the beginning of a long text: the end says more.
  void set_label(std::string_view phase_text, std::string_view module_text);
  /// "all_gather #12 of group 'dp_shard' (fsdp::all_gather layers.3)"
  std::string describe() const;
  /// The beginning of its error: "all_gather #12 in group 'dp_shard' failed".
  std::string failure() const;
};
static_assert(std::is_trivially_copyable_v<CallRecord>);

/// A device's answer about a call.
struct DeviceCall {
  bool done = false;
  int64_t ns = 0;  ///< CallRecord::device_ns
};

/// A rank's current activity; `name` lives as long as the process.
struct Activity {
  const char* name = "";
  int64_t step = 0;
  int64_t since_ns = 0;  ///< steady clock
};

/// While it lives, its thread's calls count as background work, such as writing a checkpoint: a stalled rank
/// doesn't wait for them.
class BackgroundCalls {
 public:
  BackgroundCalls();
  ~BackgroundCalls();
  /// On the calling thread.
  static bool active() noexcept;
  BackgroundCalls(const BackgroundCalls&) = delete;
  BackgroundCalls& operator=(const BackgroundCalls&) = delete;

 private:
  bool before_;
};

/// Thread-safe. One per World, shared by its groups.
class FlightRecorder {
 public:
  static constexpr size_t kDefaultEntries = 2048;
  /// The ring's minimum size: it must hold the call that a rank waits in, however few are kept for the files.
  static constexpr size_t kLeastSlots = 1024;
  /// snapshot() and files have the last `num_entries` calls; 0: none.
  explicit FlightRecorder(size_t num_entries = kDefaultEntries, size_t least_slots = kLeastSlots);
  ~FlightRecorder();
  FlightRecorder(const FlightRecorder&) = delete;
  FlightRecorder& operator=(const FlightRecorder&) = delete;

  /// Fills in `number` and `start_ns`; returns the number, for the functions below.
  uint64_t start(CallRecord call) noexcept;
  /// From now on the host waits for it.
  void wait(uint64_t number) noexcept;
  void finish(uint64_t number, CallState state, int64_t device_ns = 0) noexcept;
  /// For a call that the device finishes by itself: sweep() calls `ask`, which must not wait. If it throws,
  /// the call has failed.
  void finish_when(uint64_t number, std::function<DeviceCall()> ask);
  /// Finishes the calls that their devices have completed.
  void sweep() noexcept;

  /// The calls that are kept, oldest first.
  std::vector<CallRecord> snapshot() const;
  /// The first call that the host waits in, else the first that a device hasn't finished; nullopt if there is
  /// none. BackgroundCalls count only with `with_background`.
  std::optional<CallRecord> open_call(bool with_background) const;
  uint64_t num_calls() const noexcept { return next_.load(std::memory_order_acquire); }
  size_t num_entries() const noexcept { return num_entries_; }
  /// Reads call `number`, unless it has left the ring or is being written. Safe in a signal handler.
  bool read(uint64_t number, CallRecord& call) const noexcept;

  /// The record of a group, made once for each (name, purpose, ranks).
  const GroupRecord* add_group(const std::string& name, const std::string& purpose,
                               const std::vector<int>& ranks);
  /// The group that was added last; the others follow by `previous`. Safe in a signal handler.
  const GroupRecord* last_group() const noexcept { return last_group_.load(std::memory_order_acquire); }

  /// How long the thread that made the recorder has been blocked in waits for its peers, in all. (A wait for
  /// a GPU's group orders work and doesn't block; other threads' waits don't delay a step.)
  int64_t waited_ns() const noexcept { return waited_ns_.load(std::memory_order_relaxed); }
  void add_wait(int64_t ns) noexcept;

  /// `name` is a literal.
  void set_activity(const char* name, int64_t step) noexcept;
  Activity activity() const noexcept;

 private:
  struct Slot;
  struct OnDevice {
    uint64_t number;
    std::function<DeviceCall()> ask;
  };
  static bool claim(Slot& slot, uint64_t number) noexcept;
  Slot& slot_of(uint64_t number) const noexcept;
  bool settle(const OnDevice& call) noexcept;

  size_t num_entries_, num_slots_;
  std::unique_ptr<Slot[]> ring_;
  std::atomic<uint64_t> next_{0};

  std::mutex mutex_;  // for writers of the members below
  std::vector<std::unique_ptr<GroupRecord>> groups_;
  std::atomic<const GroupRecord*> last_group_{nullptr};

  std::mutex on_device_mutex_;
  std::vector<OnDevice> on_device_;

  std::thread::id main_thread_ = std::this_thread::get_id();
  std::atomic<int64_t> waited_ns_{0};

  std::atomic<const char*> activity_name_{""};
  std::atomic<int64_t> activity_step_{0}, activity_since_ns_{0};
};

}  // namespace titan::dist
