#pragma once

// Streams and events of a device, as values. On the CPU (and meta) they are empty and every call is a no-op,
// so that code that overlaps copies with computation is written once. Work that they queue may be recorded
// instead of done ([Note: work graphs]).

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

namespace titan::dist {

class Event;

enum class Priority { Normal, High };

/// A queue of device work. Copies are handles on the same queue. Streams come from a pool, so dropping one
/// costs nothing.
class Stream {
 public:
  Stream() = default;  ///< the CPU's: no queue, everything is done when the call returns
  explicit Stream(c10::Stream stream) : stream_(stream) {}

  static Stream current(at::Device device);
  /// Another queue of `device`; collectives that overlap the computation take Priority::High.
  static Stream create(at::Device device, Priority priority = Priority::Normal);

  bool on_device() const { return stream_.has_value(); }
  /// Whether its work is being recorded (dist/work_graph.h).
  bool is_recorded() const;
  /// Marks the work queued so far.
  Event record() const;
  /// Later work of this stream starts after `event`. Doesn't block the host.
  void wait(const Event& event) const;
  /// wait(other.record()).
  void wait(const Stream& other) const;
  /// Blocks the host until everything queued is done.
  void synchronize() const;
  /// Tells the allocator that this stream uses `tensor`'s memory: once freed, it isn't reused before the work
  /// queued here until then is done.
  void keep_alive(const at::Tensor& tensor) const;

  friend bool operator==(const Stream& a, const Stream& b) { return a.stream_ == b.stream_; }

 private:
  friend class Event;
  friend class StreamGuard;
  std::optional<c10::Stream> stream_;
};

/// A moment in a stream. Move-only; an empty event (default-constructed, or the CPU's) is always done.
class Event {
 public:
  Event() = default;
  /// One that seconds_since() reads; recording it costs the device a little more.
  static Event timed();
  Event(Event&&) noexcept = default;
  Event& operator=(Event&&) noexcept = default;

  /// Moves the mark to what `stream` has queued by now; the device's event object is reused.
  void record(const Stream& stream);
  /// Whether it was recorded in a graph that is still being made, and so isn't done.
  bool is_recorded() const;
  bool done() const;
  /// Blocks the host. Throws Error if is_recorded().
  void synchronize() const;
  /// How long after `earlier` the device reached it. Both are timed and done.
  double seconds_since(const Event& earlier) const;

 private:
  friend class Stream;
  bool timed_ = false;
  std::optional<c10::Event> event_;
  std::shared_ptr<const Event> launch_;  // recorded in a graph: the end of that graph's last launch
};

/// While it lives, streams of this process may be recorded, and events of theirs belong to `launch`, which is
/// recorded at the end of each launch.
class RecordingScope {
 public:
  explicit RecordingScope(std::shared_ptr<const Event> launch);
  ~RecordingScope();
  RecordingScope(const RecordingScope&) = delete;
  RecordingScope& operator=(const RecordingScope&) = delete;
};

/// Makes a stream the current one of its device until the end of the scope.
class StreamGuard {
 public:
  explicit StreamGuard(const Stream& stream);
  ~StreamGuard();
  StreamGuard(const StreamGuard&) = delete;
  StreamGuard& operator=(const StreamGuard&) = delete;

 private:
  std::optional<c10::Stream> previous_;
};

/// A stream and what it is for, for traces.
struct NamedStream {
  std::string name;
  Stream stream;
};

/// Names a stream by its purpose, "fsdp gather", in place of its earlier name. Streams of several owners may have
/// the same one. Ignores the CPU, which has no streams. Thread-safe.
void name_stream(std::string name, const Stream& stream);

std::vector<NamedStream> named_streams();

}  // namespace titan::dist
