#pragma once

// A record of allocations in host memory, for snapshots that PyTorch's memory viewer loads.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace titan {

/// [Note: memory history]
/// In the viewer's terms, a segment is memory from the kernel, and a block is a tensor's part of it. Here a
/// segment is one mapping (tensor/memory.h) with one block, in use or kept for the next request. Blocks below
/// 1 MiB come from malloc and aren't recorded. Each event has its call stack as addresses; names are looked
/// up when a snapshot is written.
class MemoryHistory {
 public:
  explicit MemoryHistory(size_t max_events) : max_events_(max_events) {}

  void mapped(const void* begin, size_t bytes);
  void unmapped(const void* begin);
  void allocated(const void* begin, size_t bytes);
  void freed(const void* begin);
  void out_of_memory(size_t bytes);

  /// A pickle with the keys of torch.cuda.memory._snapshot().
  std::string snapshot();
  int64_t num_out_of_memory();

 private:
  using CallStack = std::shared_ptr<const std::vector<void*>>;
  enum class Action : uint8_t { SegmentAlloc, SegmentFree, Alloc, FreeRequested, FreeCompleted, OutOfMemory };
  struct Event {
    Action action{};
    uint64_t address = 0;
    size_t bytes = 0;
    int64_t time_us = 0;
    CallStack stack;
  };
  struct Segment {
    size_t bytes = 0;
    size_t block_bytes = 0;  // 0: the block is kept, not in use
    CallStack mapped_by, allocated_by;
  };
  class Writer;

  static CallStack call_stack();
  void add(Action action, uint64_t address, size_t bytes, const CallStack& stack);

  std::mutex mutex_;
  size_t max_events_;
  std::deque<Event> events_;
  std::map<uint64_t, Segment> segments_;  // by address
  int64_t num_out_of_memory_ = 0;
};

/// The process's history, or null if nothing is recorded. Allocators call this for each large block.
MemoryHistory* memory_history();

/// Records until the process ends and keeps the last `max_events`. A second call has no effect.
void record_memory_history(size_t max_events);

}  // namespace titan
