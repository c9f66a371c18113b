#pragma once

// [Note: the caching allocator's model]
// What LibTorch's caching allocator (c10/cuda/CUDACachingAllocator.cpp of LibTorch 2.11) makes of a series of requests, without
// memory. A *block* is a range of addresses, in use or free; blocks that lie side by side in a *segment* merge when both are free. A
// *pool* has the free blocks of small requests (up to 1 MiB) or of large ones, each block for one stream. A request takes the smallest
// free block of its stream that fits, splits off what it doesn't need, and takes more memory from the device where none fits. Segments are
// expandable, as the program sets them ([Note: expandable segments] in src/cuda_plugin/cuda_backend.cpp): a range of addresses as large as
// the device, to whose end memory is mapped by 2 or 20 MiB.
//
// A freed block that other streams have used is free when they are done with it. The model takes them for done at the next request: a
// device that the host runs far ahead of keeps such blocks longer. While a CUDA graph is recorded, it can't be known, so none is free before the
// recording ends. The streams that are recorded have pools of their own, which all graphs share, and which keep their memory.
//
// Tests compare it with the real one, request by request (tests/virtual_gpu/caching_allocator_test.cpp).

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <vector>

namespace titan::plan {

class CachingAllocator {
 public:
  struct Options {
    int64_t device_bytes = 0;  ///< the most that can be reserved
    uintptr_t first_address = uintptr_t{1}
                              << 56;  ///< far from the host's, so that one that is read by mistake is a fault
  };
  explicit CachingAllocator(Options options);
  ~CachingAllocator();
  CachingAllocator(const CachingAllocator&) = delete;
  CachingAllocator& operator=(const CachingAllocator&) = delete;

  /// An address; 0 if the device has too little memory. Nothing may be read or written there.
  uintptr_t allocate(int64_t bytes, int64_t stream);
  /// From now on, until end_recording(), streams for which `is_recorded` is true take memory of the graphs.
  void begin_recording(std::function<bool(int64_t stream)> is_recorded);
  void end_recording() { is_recorded_ = nullptr; }
  void free(uintptr_t address);
  bool is_in_use(uintptr_t address) const { return in_use_.contains(address); }
  /// No block of this allocator begins here or further up.
  uintptr_t end_of_addresses() const { return next_address_; }
  /// The size of the block in use at the address.
  int64_t size_of(uintptr_t address) const;
  /// From now on `stream` uses the block, too.
  void record_stream(uintptr_t address, int64_t stream);
  /// Gives free memory back to the device.
  void empty_cache();

  struct Bytes {
    int64_t now = 0, peak = 0;
  };
  Bytes allocated() const { return allocated_; }
  /// Allocated, or freed while another stream used it.
  Bytes active() const { return active_; }
  Bytes reserved() const { return reserved_; }
  int64_t num_out_of_memory() const { return num_out_of_memory_; }
  int64_t num_retries() const { return num_retries_; }
  void reset_peaks();

 private:
  struct Block;
  struct Pool;

  /// The free blocks of small requests and of large ones.
  struct Pools;

  Pool& pool_of(int64_t size, int64_t stream);
  Block* take_free(Pool& pool, int64_t size, int64_t stream);
  Block* expanded(Pool& pool, int64_t size, int64_t stream);
  Block* room_to_expand(Pool& pool, int64_t size, int64_t stream);
  bool map(Block* block, int64_t size);
  bool reserve(int64_t bytes);
  Block* split(Block* block, int64_t size);
  void merge(Block* into, Block* other);
  void release(Block* block);
  void release_used_elsewhere();
  void unmap(Block* block);

  Options options_;
  std::unique_ptr<Pools> usual_, of_graphs_;
  std::function<bool(int64_t stream)> is_recorded_;  // while a graph is recorded
  std::map<uintptr_t, Block*> in_use_;
  std::vector<Block*> used_elsewhere_;  // freed, and not yet known to be done
  std::set<Block*> blocks_;
  uintptr_t next_address_;
  Bytes allocated_, active_, reserved_;
  int64_t num_out_of_memory_ = 0, num_retries_ = 0;
};

}  // namespace titan::plan
