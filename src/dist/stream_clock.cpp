#include "dist/stream_clock.h"

#include <atomic>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "dist/flight_record.h"

namespace titan::dist {

struct StreamClock::State {
  struct Wait {
    Event begin, end;
  };
  struct Step {
    Stream stream;
    at::Device device;
    Event begin, end;
    std::vector<Wait> waits;
  };

  Event mark(const Stream& stream) {
    Event event = spare.empty() ? Event::timed() : std::move(spare.back());
    if (!spare.empty()) spare.pop_back();
    event.record(stream);
    return event;
  }
  StreamStep read(Step& step);

  std::mutex mutex;
  std::vector<Event> spare;
  std::optional<Step> open;
  std::deque<Step> closed;  // oldest first
  std::optional<Event> last_end;
};

namespace {

/// The process's clock. Streams belong to the process, and so does the clock that watches one.
template <class State>
struct Watching {
  std::atomic<bool> any{false};
  std::mutex mutex;
  std::shared_ptr<State> clock;

  static Watching& get() {
    static Watching watching;
    return watching;
  }
  void set(std::shared_ptr<State> state) {
    const std::lock_guard lock(mutex);
    clock = std::move(state);
    any = clock != nullptr;
  }
};

}  // namespace

StreamStep StreamClock::State::read(Step& step) {
  StreamStep times;
  if (last_end) times.idle_s = step.begin.seconds_since(*last_end);
  times.span_s = step.end.seconds_since(step.begin);
  for (Wait& wait : step.waits) {
    times.waited_s += wait.end.seconds_since(wait.begin);
    spare.push_back(std::move(wait.begin));
    spare.push_back(std::move(wait.end));
  }
  spare.push_back(std::move(step.begin));
  if (last_end) spare.push_back(std::move(*last_end));
  last_end = std::move(step.end);
  return times;
}

StreamClock::StreamClock() : state_(std::make_shared<State>()) { Watching<State>::get().set(state_); }

StreamClock::~StreamClock() {
  auto& watching = Watching<State>::get();
  const std::lock_guard lock(watching.mutex);
  if (watching.clock != state_) return;
  watching.clock.reset();
  watching.any = false;
}

void StreamClock::start(at::Device device) {
  const std::lock_guard lock(state_->mutex);
  const Stream stream = Stream::current(device);
  state_->open = State::Step{stream, device, state_->mark(stream), {}, {}};
}

bool StreamClock::stop() {
  const std::lock_guard lock(state_->mutex);
  if (!state_->open) return false;
  state_->open->end = state_->mark(state_->open->stream);
  state_->closed.push_back(*std::exchange(state_->open, std::nullopt));
  return true;
}

std::vector<StreamStep> StreamClock::take() {
  const std::lock_guard lock(state_->mutex);
  std::vector<StreamStep> steps;
  for (; !state_->closed.empty() && state_->closed.front().end.done(); state_->closed.pop_front())
    steps.push_back(state_->read(state_->closed.front()));
  return steps;
}

PeerWait::PeerWait(const char* what) : range_([what] { return std::string("peer wait ") + what; }) {
  auto& watching = Watching<StreamClock::State>::get();
  if (!watching.any || BackgroundCalls::active()) return;
  {
    const std::lock_guard lock(watching.mutex);
    clock_ = watching.clock;
  }
  if (!clock_) return;
  const std::lock_guard lock(clock_->mutex);
  auto& step = clock_->open;
  if (!step || !(Stream::current(step->device) == step->stream) || step->stream.is_recorded()) {
    clock_ = nullptr;  // this mutex is locked: the clock itself keeps its state
    return;
  }
  wait_ = step->waits.size();
  step->waits.push_back({clock_->mark(step->stream), {}});
}

PeerWait::~PeerWait() {
  if (!clock_) return;
  try {
    const std::lock_guard lock(clock_->mutex);
    auto& step = clock_->open;
    if (step && wait_ < step->waits.size()) step->waits[wait_].end = clock_->mark(step->stream);
  } catch (const std::exception&) {
    // A device that has failed. The training thread meets the same error, and knows more about its cause.
  }
}

}  // namespace titan::dist
