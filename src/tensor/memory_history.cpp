#include "tensor/memory_history.h"

#include <atomic>
#include <chrono>

#include <torch/csrc/profiler/unwind/unwind.h>

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

// A block that was mapped before the history began comes with its mapping.
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

}  // namespace titan
