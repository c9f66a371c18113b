#include "dist/stream.h"

#include <algorithm>
#include <mutex>

#include <c10/core/impl/VirtualGuardImpl.h>

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

}  // namespace

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
  if (stream_ && event.event_) event.event_->block(*stream_);
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

bool Event::done() const { return !event_ || event_->query(); }

void Event::synchronize() const {
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
  const auto known = std::ranges::find(names.list, name, &NamedStream::name);
  if (known == names.list.end())
    names.list.push_back({std::move(name), stream});
  else
    known->stream = stream;
}

std::vector<NamedStream> named_streams() {
  StreamNames& names = stream_names();
  const std::lock_guard lock(names.mutex);
  return names.list;
}

}  // namespace titan::dist
