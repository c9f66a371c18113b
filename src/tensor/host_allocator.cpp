#include "tensor/host_allocator.h"

#include <algorithm>
#include <list>
#include <unordered_map>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include "tensor/memory_history.h"
#include "tensor/model_memory.h"

namespace titan {

namespace {

constexpr size_t kSmallest = size_t{1} << 20;
constexpr size_t kSlack = size_t{64} << 20;
// A kept block serves requests down to this share of its size.
constexpr double kSmallestUse = 0.9;

class HostAllocator final : public c10::Allocator {
 public:
  at::DataPtr allocate(size_t bytes) override {
    if (bytes < kSmallest) return c10::GetDefaultCPUAllocator()->allocate(bytes);
    char* begin = take(whole_pages(bytes));
    return {begin, begin, &free_block, at::kCPU};
  }
  // LibTorch's matrix products allocate and free by bare pointers.
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  HostMemoryStats stats() {
    const std::lock_guard lock(mutex_);
    return stats_;
  }

 private:
  static void free_block(void* begin);

  char* take(size_t bytes) {
    const std::lock_guard lock(mutex_);
    Pages pages = take_kept(bytes);
    if (!pages.begin) pages = map(bytes);
    stats_.in_use_bytes += pages.bytes;
    stats_.peak_in_use_bytes = std::max(stats_.peak_in_use_bytes, stats_.in_use_bytes);
    in_use_.emplace(pages.begin, pages.bytes);
    if (MemoryHistory* history = memory_history()) history->allocated(pages.begin, bytes);
    return pages.begin;
  }

  Pages map(size_t bytes) {
    const size_t in_use = stats_.in_use_bytes + bytes, peak = std::max(stats_.peak_in_use_bytes, in_use);
    while (!kept_.empty() && in_use + stats_.kept_bytes > peak + peak / 16 + kSlack) drop_oldest();
    Pages pages;
    try {
      pages = map_pages(bytes);
    } catch (const std::bad_alloc&) {
      // Where a process's memory is limited (ulimit -v, a cgroup), giving kept blocks back may suffice.
      if (kept_.empty()) throw;
      while (!kept_.empty()) drop_oldest();
      pages = map_pages(bytes);
    }
    ++stats_.num_mappings;
    return pages;
  }

  // The smallest that is large enough; among equals the one freed last, as its pages may be in a cache.
  Pages take_kept(size_t bytes) {
    auto best = kept_.end();
    for (auto it = kept_.begin(); it != kept_.end(); ++it) {
      if (it->bytes < bytes || static_cast<double>(bytes) < kSmallestUse * static_cast<double>(it->bytes))
        continue;
      if (best == kept_.end() || it->bytes < best->bytes) best = it;
      if (best->bytes == bytes) break;
    }
    if (best == kept_.end()) return {};
    const Pages pages = *best;
    kept_.erase(best);
    stats_.kept_bytes -= pages.bytes;
    return pages;
  }

  /// False for a block that this allocator didn't make.
  bool keep(void* begin) {
    const std::lock_guard lock(mutex_);
    const auto block = in_use_.find(begin);
    if (block == in_use_.end()) return false;
    if (MemoryHistory* history = memory_history()) history->freed(begin);
    kept_.push_front({static_cast<char*>(begin), block->second});
    in_use_.erase(block);
    stats_.in_use_bytes -= kept_.front().bytes;
    stats_.kept_bytes += kept_.front().bytes;
    return true;
  }

  void drop_oldest() {
    stats_.kept_bytes -= kept_.back().bytes;
    unmap_pages(kept_.back());
    kept_.pop_back();
  }

  std::mutex mutex_;
  std::unordered_map<void*, size_t> in_use_;
  std::list<Pages> kept_;  // last freed first; a few hundred at most
  HostMemoryStats stats_;
};

// Never destroyed: tensors outlive main.
HostAllocator& allocator() {
  static auto* instance = new HostAllocator();
  return *instance;
}

void HostAllocator::free_block(void* begin) {
  if (!allocator().keep(begin)) c10::GetDefaultCPUAllocator()->raw_deallocate(begin);
}

}  // namespace

void install_host_allocator() { c10::SetCPUAllocator(&allocator(), /*priority=*/1); }

HostMemoryStats host_memory_stats() { return allocator().stats(); }

}  // namespace titan
