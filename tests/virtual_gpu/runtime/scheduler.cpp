// The scheduler: the thread that runs what is queued, and the waits for it.

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <thread>
#include <utility>

#include "runtime/counters.h"
#include "runtime/memory.h"
#include "runtime/races.h"
#include "runtime/stream.h"
#include "runtime/unwritten.h"

namespace virtual_gpu {
namespace {

using std::chrono::microseconds;
using std::chrono::steady_clock;

// SplitMix64 of the seed, the stream and the number of the delay: the machine's speed, which decides how streams take turns, changes nothing.
microseconds next_delay(const Settings& settings, Stream& stream) {
  uint64_t z = (settings.seed << 48) + (static_cast<uint64_t>(stream.id) << 32) + ++stream.num_delays;
  z *= 0x9E3779B97F4A7C15ull;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ z >> 27) * 0x94D049BB133111EBull;
  return microseconds((z ^ z >> 31) % static_cast<uint64_t>(settings.max_delay_us));
}

// The first item may be late if times are drawn at random.
bool is_too_early(State& s, Stream& stream, Time now) {
  if (s.settings.max_delay_us == 0) return false;
  if (!stream.has_not_before) {
    stream.not_before = now + next_delay(s.settings, stream);
    stream.has_not_before = true;
  }
  return now < stream.not_before;
}

// With VIRTUAL_GPU_QUEUES, an item begins after all earlier ones of its queue. So a wait, or an operation that comes after one that runs, holds
// up other streams. Items of graphs have no queue.
std::deque<Stream*>* queue_of(State& s, const Stream& stream) {
  return s.settings.num_queues > 0 && !stream.is_lane ? &s.queues[std::abs(stream.id) % s.settings.num_queues]
                                                      : nullptr;
}
bool is_its_turn(State& s, const Stream& stream) {
  const std::deque<Stream*>* const queue = queue_of(s, stream);
  return !queue || stream.running || queue->front() == &stream;
}
void begin_in_queue(State& s, const Stream& stream) {
  if (std::deque<Stream*>* const queue = queue_of(s, stream)) queue->pop_front();
}

// By the running operation.
Accessed found;
const Stamp* stamp_of_running = nullptr;

enum class Outcome { nothing, must_retry, done };

// Runs the stream's first item if it may run. The lock is released while an operation runs.
Outcome run_first(Lock& lock, State& s, Stream& stream) {
  if (stream.items.empty()) return Outcome::nothing;
  if (is_too_early(s, stream, steady_clock::now())) return Outcome::must_retry;
  if (!is_its_turn(s, stream)) return Outcome::nothing;
  Item& item = stream.items.front();
  if (auto* wait = std::get_if<WaitFor>(&item)) {
    if (!wait->marker->is_done) return Outcome::nothing;
    begin_in_queue(s, stream);
  } else if (auto* reached = std::get_if<Reached>(&item)) {
    begin_in_queue(s, stream);
    reached->marker->is_done = true;
    reached->marker->done_at = steady_clock::now();
  } else {
    auto& operation = std::get<Operation>(item);
    if (!stream.running) begin_in_queue(s, stream);
    stream.is_running = true;
    stamp_of_running = operation.stamp.get();
    check_ends(operation);
    deliver_to(operation.ranges);
    lock.unlock();
    if (!stream.running) stream.running = operation.begin();
    const bool done = stream.running();
    if (done) stream.running = nullptr;  // without the lock, because it may release tensors
    lock.lock();
    stream.is_running = false;
    if (!done) return Outcome::must_retry;
    count_accesses(operation, found);
    operation.ranges.insert(operation.ranges.end(), found.ranges.begin(), found.ranges.end());
    found = {};
    check_ranges(operation);
    check_reads(operation);
  }
  Item finished = std::move(stream.items.front());
  stream.items.pop_front();
  stream.has_not_before = false;
  s.changed.notify_all();
  lock.unlock();
  { const Item released = std::move(finished); }
  lock.lock();
  return Outcome::done;
}

bool stops = false;
bool has_stopped = false;
std::condition_variable& work_available() {
  static auto* condition = new std::condition_variable;
  return *condition;
}

void schedule() {
  pthread_setname_np(pthread_self(), "virtual_gpu");
  State& s = state();
  Lock lock(s.mutex);
  size_t first = 0;
  int idle_turns = 0;
  while (!stops) {
    bool any_done = false;
    bool any_retry = false;
    const size_t num_streams = s.streams.size();
    first = s.settings.max_delay_us > 0 ? s.random() : first + 1;
    for (size_t i = 0; i < num_streams && !stops; ++i) {
      Stream& stream = *s.streams[(first + i) % num_streams];
      Outcome outcome = run_first(lock, s, stream);
      any_retry |= outcome == Outcome::must_retry;
      // One stream runs on as long as it can: changing streams costs more than a small operation.
      for (int n = 0; outcome == Outcome::done && n < 64; ++n) {
        any_done = true;
        if (stops || s.settings.max_delay_us > 0) break;
        outcome = run_first(lock, s, stream);
        any_retry |= outcome == Outcome::must_retry;
      }
    }
    std::erase_if(s.streams, [](const auto& stream) {
      // A graph that is being captured knows its streams by their addresses.
      if (!stream->is_destroyed || !stream->items.empty() || stream->capture) return false;
      note_end(*stream);
      return true;
    });
    if (any_done || stops) {
      idle_turns = 0;
    } else if (any_retry) {
      // Other ranks run on the same cores, so waiting for them must leave the cores free.
      work_available().wait_for(lock, microseconds(std::min(20 * ++idle_turns, 500)));
    } else {
      work_available().wait(lock);
    }
  }
  has_stopped = true;
  s.changed.notify_all();
}

std::atomic<bool> has_started = false;

void start_scheduler(State& s) {
  if (s.scheduler_runs) return;
  s.scheduler_runs = true;
  std::thread(schedule).detach();
  has_started = true;
  std::atexit([] { stop_scheduler(nullptr); });
}

}  // namespace

const Stamp* running_stamp() { return stamp_of_running; }

bool scheduler_has_started() { return has_started; }

void stop_scheduler(void* /*unused*/) {
  State& s = state();
  Lock lock(s.mutex);
  stops = true;
  work_available().notify_all();
  s.changed.wait_for(lock, std::chrono::minutes(2), [] { return has_stopped; });
}
void add_accesses(Accessed accessed) { found = std::move(accessed); }

void wait_for(Lock& lock, Stream& stream) {
  work_available().notify_all();
  state().changed.wait(lock, [&] { return stream.items.empty() || stops; });
}

void wait_for_device(Lock& lock, int device) {
  work_available().notify_all();
  state().changed.wait(lock, [&] {
    return stops || std::ranges::all_of(state().streams, [&](const auto& s) {
             return s->device != device || s->items.empty();
           });
  });
}

void wait_for(Lock& lock, const MarkerPtr& marker) {
  work_available().notify_all();
  state().changed.wait(lock, [&] { return marker->is_done || stops; });
}

void wait_for_place(Lock& lock, Stream& stream) {
  const size_t limit = state().settings.queue_limit;
  if (limit > 0) state().changed.wait(lock, [&] { return stream.items.size() < limit || stops; });
}

void push(Lock& lock, Stream& stream, Item item) {
  State& s = state();
  if (stream.capture) {
    Graph& graph = *stream.capture->graph;
    if (const auto [lane, is_new] = graph.lanes.try_emplace(&stream, s.next_stream); is_new)
      s.lanes[s.next_stream++] = stream.id;
    graph.items.push_back({&stream, std::move(item)});
    return;
  }
  start_scheduler(s);
  const bool is_operation = std::holds_alternative<Operation>(item);
  if (is_operation) wait_for_place(lock, stream);
  stream.items.push_back(std::move(item));
  if (std::deque<Stream*>* const queue = queue_of(s, stream)) queue->push_back(&stream);
  work_available().notify_all();
  if (s.settings.launch_blocking && is_operation) wait_for(lock, stream);
}

}  // namespace virtual_gpu
