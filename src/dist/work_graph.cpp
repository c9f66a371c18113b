#include "dist/work_graph.h"

#include <atomic>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "dist/device_backend.h"
#include "dist/flight_record.h"
#include "titan/core/error.h"

namespace titan::dist {

struct WorkGraph::Impl {
  at::Device device;
  std::unique_ptr<DeviceGraph> graph;
  std::vector<Repeat> calls;          // in the order of the recording
  std::vector<Stream> other_streams;  // that take part
  std::shared_ptr<Event> launched = std::make_shared<Event>();
};

namespace {

// The graph that is being recorded; set by the thread that records, read by it and by autograd's.
std::atomic<std::vector<WorkGraph::Repeat>*> calls_of_recording{nullptr};

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    return reason_of(known);
  } catch (...) {
    return "an exception of unknown type";
  }
}

}  // namespace

WorkGraph::WorkGraph(at::Device device) {
  DeviceBackend* const backend = device_backend();
  TITAN_CHECK(backend && backend->device_type() == device.type(), "work graphs need a GPU, not ",
              device.str());
  impl_ = std::make_unique<Impl>(
      Impl{.device = device, .graph = backend->make_graph(), .calls = {}, .other_streams = {}});
}

// While an error unwinds, a peer may be gone for which the graph would wait forever; the process ends.
WorkGraph::~WorkGraph() {
  if (std::uncaught_exceptions() > 0) {
    static_cast<void>(impl_.release());
    return;
  }
  try {
    impl_->launched->synchronize();
  } catch (const std::exception&) {
    // A device that has failed. Whoever uses it next meets the same error.
  }
}

void WorkGraph::record(const std::function<void()>& queue) {
  // Its owners would hand it to the recording, and free it later.
  IdleMemory::give_back();
  const RecordingScope scope(impl_->launched);
  impl_->graph->begin();
  std::exception_ptr error;
  calls_of_recording = &impl_->calls;
  try {
    queue();
    join_streams();
  } catch (...) {
    error = std::current_exception();
  }
  calls_of_recording = nullptr;
  try {
    impl_->graph->end();
  } catch (const std::exception& failure) {
    throw Error(str("this work can't be recorded: ", error ? text_of(error) : reason_of(failure)));
  }
  if (error) std::rethrow_exception(error);
}

// Nobody may have waited for a stream's last work.
void WorkGraph::join_streams() {
  const Stream current = Stream::current(impl_->device);
  for (const NamedStream& other : named_streams()) {
    if (other.stream == current || !other.stream.is_recorded()) continue;
    current.wait(other.stream);
    impl_->other_streams.push_back(other.stream);
  }
}

void WorkGraph::launch() {
  const Stream stream = Stream::current(impl_->device);
  for (const Stream& other : impl_->other_streams) stream.wait(other);
  impl_->graph->launch();
  impl_->launched->record(stream);
  if (impl_->calls.empty()) return;
  // An event of its own, which another thread asks.
  const auto end = std::make_shared<const Event>(stream.record());
  const auto ask = [end]() -> DeviceCall { return {.done = end->done()}; };
  for (const Repeat& call : impl_->calls) call(ask);
}

bool WorkGraph::records(at::Device device) {
  return calls_of_recording.load() && Stream::current(device).is_recorded();
}

void WorkGraph::add(Repeat repeat) { calls_of_recording.load()->push_back(std::move(repeat)); }

}  // namespace titan::dist
