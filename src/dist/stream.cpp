#include "dist/stream.h"

#include <algorithm>
#include <atomic>
#include <mutex>

#include <c10/core/impl/VirtualGuardImpl.h>

#include "dist/device_backend.h"
#include "titan/core/error.h"

namespace titan::dist {
namespace {

bool has_streams(at::Device device) { return !device.is_cpu() && !device.is_meta(); }

struct StreamNames {
  std::mutex mutex;
  std::vector<NamedStream> list;
};

// LibTorch's pools of streams belong to the process, and so do these names.
StreamNames& stream_names() {
  static StreamNames names;
  return names;
}

/// The recording in progress in this process.
struct Recording {
  std::atomic<bool> any{false};
  std::mutex mutex;
  std::shared_ptr<const Event> launch;
};

Recording& recording() {
  static Recording the_one;
  return the_one;
}

// The recording that the stream takes part in, or null.
std::shared_ptr<const Event> recording_of(const c10::Stream& stream) {
  if (!recording().any || !device_backend()->is_recorded(stream)) return nullptr;
  const std::lock_guard lock(recording().mutex);
  return recording().launch;
}

// Whether `launch` belongs to the recording in progress, which hasn't been launched yet.
bool is_in_progress(const std::shared_ptr<const Event>& launch) {
  if (!launch || !recording().any) return false;
  const std::lock_guard lock(recording().mutex);
  return recording().launch == launch;
}

}  // namespace

RecordingScope::RecordingScope(std::shared_ptr<const Event> launch) {
  const std::lock_guard lock(recording().mutex);
  TITAN_CHECK(!recording().launch, "device work is being recorded already");
  recording().launch = std::move(launch);
  recording().any = true;
}

RecordingScope::~RecordingScope() {
  const std::lock_guard lock(recording().mutex);
  recording().any = false;
  recording().launch = nullptr;
}

bool Stream::is_recorded() const { return stream_ && recording_of(*stream_); }

Stream Stream::current(at::Device device) {
  if (!has_streams(device)) return {};
  return Stream(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

Stream Stream::create(at::Device device, Priority priority) {
  if (!has_streams(device)) return {};
  const c10::impl::VirtualGuardImpl guard(device.type());
  return Stream(guard.getStreamFromGlobalPool(device, priority == Priority::High));
}

Event Stream::record() const {
  Event event;
  event.record(*this);
  return event;
}

void Stream::wait(const Event& event) const {
  if (!stream_ || !event.event_) return;
  if (event.is_recorded())
    event.event_->block(*stream_);  // this stream takes part from now on
  else if (is_recorded())
    return;  // the event is before every launch
  else if (event.launch_)
    wait(*event.launch_);
  else
    event.event_->block(*stream_);
}

void Stream::wait(const Stream& other) const {
  if (stream_ && other.stream_ && stream_ != other.stream_) wait(other.record());
}

void Stream::synchronize() const {
  if (stream_) stream_->synchronize();
}

void Stream::keep_alive(const at::Tensor& tensor) const {
  if (stream_ && tensor.has_storage() && tensor.storage().nbytes() > 0) tensor.record_stream(*stream_);
}

void Event::record(const Stream& stream) {
  if (!stream.stream_) return;
  const auto flag = timed_ ? c10::EventFlag::BACKEND_DEFAULT : c10::EventFlag::PYTORCH_DEFAULT;
  if (!event_) event_.emplace(stream.stream_->device_type(), flag);
  // Other threads may ask an event that no recording concerns.
  if (auto launch = recording_of(*stream.stream_); launch != launch_) launch_ = std::move(launch);
  event_->record(*stream.stream_);
}

Event Event::timed() {
  Event event;
  event.timed_ = true;
  return event;
}

double Event::seconds_since(const Event& earlier) const {
  return event_ && earlier.event_ ? 1e-3 * earlier.event_->elapsedTime(*event_) : 0;
}

bool Event::is_recorded() const { return is_in_progress(launch_); }

bool Event::done() const {
  if (launch_) return !is_recorded() && launch_->done();
  return !event_ || event_->query();
}

void Event::synchronize() const {
  TITAN_CHECK(!is_recorded(), "the host can't wait for work that is being recorded");
  if (launch_) return launch_->synchronize();
  if (event_) event_->synchronize();
}

StreamGuard::StreamGuard(const Stream& stream) {
  if (!stream.stream_) return;
  previous_ = c10::impl::VirtualGuardImpl(stream.stream_->device_type()).exchangeStream(*stream.stream_);
}

StreamGuard::~StreamGuard() {
  if (previous_) c10::impl::VirtualGuardImpl(previous_->device_type()).exchangeStream(*previous_);
}

void name_stream(std::string name, const Stream& stream) {
  if (!stream.on_device()) return;
  StreamNames& names = stream_names();
  const std::lock_guard lock(names.mutex);
  const auto known = std::ranges::find(names.list, stream, &NamedStream::stream);
  if (known == names.list.end())
    names.list.push_back({std::move(name), stream});
  else
    known->name = std::move(name);
}

std::vector<NamedStream> named_streams() {
  StreamNames& names = stream_names();
  const std::lock_guard lock(names.mutex);
  return names.list;
}

}  // namespace titan::dist
