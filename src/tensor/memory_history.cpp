#include "tensor/memory_history.h"

#include <array>
#include <atomic>
#include <chrono>
#include <unordered_map>

#include <torch/csrc/profiler/unwind/unwind.h>

#include "core/pickle.h"

namespace titan {

namespace {

uint64_t address_of(const void* begin) { return reinterpret_cast<uintptr_t>(begin); }

int64_t now_us() {
  using namespace std::chrono;
  return duration_cast<microseconds>(system_clock::now().time_since_epoch()).count();
}

std::atomic<MemoryHistory*> recording{nullptr};

}  // namespace

MemoryHistory* memory_history() { return recording.load(std::memory_order_acquire); }

// Never destroyed: tensors outlive main.
void record_memory_history(size_t max_events) {
  static auto* history = new MemoryHistory(max_events);
  recording.store(history, std::memory_order_release);
}

MemoryHistory::CallStack MemoryHistory::call_stack() {
  return std::make_shared<const std::vector<void*>>(torch::unwind::unwind());
}

void MemoryHistory::add(Action action, uint64_t address, size_t bytes, const CallStack& stack) {
  events_.push_back({action, address, bytes, now_us(), stack});
  if (events_.size() > max_events_) events_.pop_front();
}

void MemoryHistory::mapped(const void* begin, size_t bytes) {
  const CallStack stack = call_stack();
  const std::lock_guard lock(mutex_);
  segments_[address_of(begin)] = {bytes, 0, stack, {}};
  add(Action::SegmentAlloc, address_of(begin), bytes, stack);
}

void MemoryHistory::unmapped(const void* begin) {
  const CallStack stack = call_stack();
  const std::lock_guard lock(mutex_);
  const auto segment = segments_.find(address_of(begin));
  if (segment == segments_.end()) return;  // older than the history
  add(Action::SegmentFree, segment->first, segment->second.bytes, stack);
  segments_.erase(segment);
}

// A block that was mapped before the history began is recorded with its mapping.
void MemoryHistory::allocated(const void* begin, size_t bytes) {
  const CallStack stack = call_stack();
  const std::lock_guard lock(mutex_);
  const auto [segment, is_new] = segments_.try_emplace(address_of(begin), Segment{bytes, 0, stack, {}});
  if (is_new) add(Action::SegmentAlloc, segment->first, bytes, stack);
  segment->second.block_bytes = bytes;
  segment->second.allocated_by = stack;
  add(Action::Alloc, segment->first, bytes, stack);
}

void MemoryHistory::freed(const void* begin) {
  const CallStack stack = call_stack();
  const std::lock_guard lock(mutex_);
  const auto segment = segments_.find(address_of(begin));
  if (segment == segments_.end() || segment->second.block_bytes == 0) return;
  add(Action::FreeRequested, segment->first, segment->second.block_bytes, stack);
  add(Action::FreeCompleted, segment->first, segment->second.block_bytes, stack);
  segment->second.block_bytes = 0;
}

void MemoryHistory::out_of_memory(size_t bytes) {
  const CallStack stack = call_stack();
  const std::lock_guard lock(mutex_);
  ++num_out_of_memory_;
  add(Action::OutOfMemory, 0, bytes, stack);
}

int64_t MemoryHistory::num_out_of_memory() {
  const std::lock_guard lock(mutex_);
  return num_out_of_memory_;
}

namespace {

constexpr std::array kActions = {"segment_alloc",  "segment_free",   "alloc",
                                 "free_requested", "free_completed", "oom"};

// Converts addresses to the frames that the viewer shows. Each place in the program is written once.
class FrameTable {
 public:
  explicit FrameTable(PickleWriter& pickle) : pickle_(pickle) {}

  void expect(const std::vector<void*>& stack) {
    for (void* place : stack)
      if (numbers_.try_emplace(place, places_.size()).second) places_.push_back(place);
  }
  // Uses the dynamic linker's tables, because looking up lines would run addr2line over LibTorch for minutes.
  void look_up() {
    frames_ = torch::unwind::symbolize(places_, torch::unwind::Mode::dladdr);
    written_.resize(frames_.size(), kNotYet);
  }
  void write(const std::vector<void*>& stack) {
    pickle_.begin_list();
    for (void* place : stack) {
      write_frame(numbers_.at(place));
      pickle_.append();
    }
  }

 private:
  static constexpr int64_t kNotYet = -1;

  void write_frame(size_t number) {
    if (written_[number] != kNotYet) return pickle_.again(static_cast<uint32_t>(written_[number]));
    const torch::unwind::Frame& frame = frames_[number];
    pickle_.begin_dict();
    written_[number] = pickle_.remember();
    pickle_.item("name", frame.funcname);
    pickle_.item("filename", frame.filename);
    pickle_.item("line", static_cast<int64_t>(frame.lineno));
  }

  PickleWriter& pickle_;
  std::unordered_map<void*, size_t> numbers_;
  std::vector<void*> places_;
  std::vector<torch::unwind::Frame> frames_;
  std::vector<int64_t> written_;
};

}  // namespace

class MemoryHistory::Writer {
 public:
  explicit Writer(const MemoryHistory& history) : history_(history), frames_(pickle_) {
    for (const Event& event : history.events_) expect(event.stack);
    for (const auto& [address, segment] : history.segments_) {
      expect(segment.mapped_by);
      expect(segment.allocated_by);
    }
    frames_.look_up();
  }

  std::string write() {
    pickle_.begin_dict();
    pickle_.text("segments");
    pickle_.begin_list();
    for (const auto& [address, segment] : history_.segments_) {
      write_segment(address, segment);
      pickle_.append();
    }
    pickle_.set_item();
    write_traces();
    for (const char* empty : {"allocator_settings", "external_annotations"}) {
      pickle_.text(empty);
      *empty == 'a' ? pickle_.begin_dict() : pickle_.begin_list();
      pickle_.set_item();
    }
    return pickle_.finish();
  }

 private:
  void expect(const CallStack& stack) {
    if (stack && expected_.try_emplace(stack.get(), kNotYet).second) frames_.expect(*stack);
  }

  // Writes "frames", one object for each distinct stack.
  void write_frames(const CallStack& stack) {
    pickle_.text("frames");
    int64_t& written = expected_.at(stack.get());
    if (written == kNotYet) {
      frames_.write(*stack);
      written = pickle_.remember();
    } else {
      pickle_.again(static_cast<uint32_t>(written));
    }
    pickle_.set_item();
  }

  void write_segment(uint64_t address, const Segment& segment) {
    const auto in_use = static_cast<int64_t>(segment.block_bytes);
    pickle_.begin_dict();
    pickle_.item("device", int64_t{0});
    pickle_.item("address", static_cast<int64_t>(address));
    pickle_.item("total_size", static_cast<int64_t>(segment.bytes));
    for (const char* size : {"allocated_size", "active_size", "requested_size"}) pickle_.item(size, in_use);
    pickle_.item("stream", int64_t{0});
    pickle_.item("segment_type", "large");
    pickle_.text("is_expandable");
    pickle_.boolean(false);
    pickle_.set_item();
    write_frames(segment.mapped_by);
    pickle_.text("blocks");
    pickle_.begin_list();
    write_block(address, segment);
    pickle_.append();
    pickle_.set_item();
  }

  void write_block(uint64_t address, const Segment& segment) {
    pickle_.begin_dict();
    pickle_.item("address", static_cast<int64_t>(address));
    pickle_.item("size", static_cast<int64_t>(segment.bytes));
    pickle_.item("requested_size", static_cast<int64_t>(segment.block_bytes));
    pickle_.item("state", segment.block_bytes > 0 ? "active_allocated" : "inactive");
    write_frames(segment.allocated_by ? segment.allocated_by : segment.mapped_by);
  }

  // Writes a list of events per device; there is one device.
  void write_traces() {
    pickle_.text("device_traces");
    pickle_.begin_list();
    pickle_.begin_list();
    for (const Event& event : history_.events_) {
      write_event(event);
      pickle_.append();
    }
    pickle_.append();
    pickle_.set_item();
  }

  void write_event(const Event& event) {
    pickle_.begin_dict();
    pickle_.item("action", kActions[static_cast<size_t>(event.action)]);
    pickle_.item(event.action == Action::OutOfMemory ? "device_free" : "addr",
                 static_cast<int64_t>(event.address));
    pickle_.item("size", static_cast<int64_t>(event.bytes));
    pickle_.item("stream", int64_t{0});
    pickle_.item("time_us", event.time_us);
    write_frames(event.stack);
  }

  static constexpr int64_t kNotYet = -1;
  const MemoryHistory& history_;
  PickleWriter pickle_;
  FrameTable frames_;
  std::unordered_map<const std::vector<void*>*, int64_t> expected_;  // stacks, and their places in the pickle
};

std::string MemoryHistory::snapshot() {
  const std::lock_guard lock(mutex_);
  return Writer(*this).write();
}

}  // namespace titan
