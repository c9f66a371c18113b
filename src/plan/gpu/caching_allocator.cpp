#include "plan/gpu/caching_allocator.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "titan/core/error.h"

namespace titan::plan {

namespace {

constexpr int64_t kMiB = 1 << 20;
constexpr int64_t kSmallestBlock = 512;       // kMinBlockSize
constexpr int64_t kSmallRequest = kMiB;       // kSmallSize
constexpr int64_t kSmallSegment = 2 * kMiB;   // kSmallBuffer
constexpr int64_t kLargeSegment = 20 * kMiB;  // large_segment_size

int64_t rounded_up(int64_t bytes, int64_t multiple) { return (bytes + multiple - 1) / multiple * multiple; }

int64_t block_size_for(int64_t bytes) { return std::max(kSmallestBlock, rounded_up(bytes, kSmallestBlock)); }

void add(CachingAllocator::Bytes& bytes, int64_t change) {
  bytes.now += change;
  bytes.peak = std::max(bytes.peak, bytes.now);
}

}  // namespace

struct CachingAllocator::Block {
  Pool* pool = nullptr;
  int64_t stream = 0;
  uintptr_t address = 0;
  int64_t size = 0;
  Block *previous = nullptr, *next = nullptr;  // in the segment
  bool is_allocated = false;
  bool is_mapped = true;
  uintptr_t segment = 0;  // where it begins
  std::set<int64_t> other_streams = {};

  bool is_free() const { return !is_allocated && other_streams.empty(); }
};

struct CachingAllocator::Pool {
  bool is_small = false;
  struct BySize {
    bool operator()(const Block* a, const Block* b) const {
      return std::tuple(a->stream, a->size, a->address) < std::tuple(b->stream, b->size, b->address);
    }
  };
  struct ByAddress {
    bool operator()(const Block* a, const Block* b) const {
      return std::tuple(a->stream, a->address) < std::tuple(b->stream, b->address);
    }
  };
  std::set<Block*, BySize> free;
  std::set<Block*, ByAddress> unmapped;

  int64_t granularity() const { return is_small ? kSmallSegment : kLargeSegment; }
};

struct CachingAllocator::Pools {
  Pool small{.is_small = true, .free = {}, .unmapped = {}}, large;
};

CachingAllocator::CachingAllocator(Options options)
    : options_(std::move(options)),
      usual_(std::make_unique<Pools>()),
      of_graphs_(std::make_unique<Pools>()),
      next_address_(options_.first_address) {}

CachingAllocator::~CachingAllocator() {
  for (const Block* block : blocks_) delete block;
}

CachingAllocator::Pool& CachingAllocator::pool_of(int64_t size, int64_t stream) {
  Pools& pools = is_recorded_ && is_recorded_(stream) ? *of_graphs_ : *usual_;
  return size <= kSmallRequest ? pools.small : pools.large;
}

void CachingAllocator::begin_recording(std::function<bool(int64_t stream)> is_recorded) {
  is_recorded_ = std::move(is_recorded);
}

uintptr_t CachingAllocator::allocate(int64_t bytes, int64_t stream) {
  if (!is_recorded_) release_used_elsewhere();
  const int64_t size = block_size_for(bytes);
  Pool& pool = pool_of(size, stream);
  Block* block = take_free(pool, size, stream);
  if (!block) block = expanded(pool, size, stream);
  if (!block && !is_recorded_) {
    // The real one gives back all that is free and asks again.
    ++num_retries_;
    empty_cache();
    block = expanded(pool, size, stream);
  }
  if (!block) {
    ++num_out_of_memory_;
    return 0;
  }
  if (block->size - size >= kSmallestBlock) block = split(block, size);
  block->is_allocated = true;
  in_use_[block->address] = block;
  add(allocated_, block->size);
  add(active_, block->size);
  return block->address;
}

void CachingAllocator::free(uintptr_t address) {
  const auto found = in_use_.find(address);
  TITAN_INTERNAL_ASSERT(found != in_use_.end(), "a planned device frees an address that isn't in use");
  Block* block = found->second;
  in_use_.erase(found);
  block->is_allocated = false;
  add(allocated_, -block->size);
  if (block->other_streams.empty())
    release(block);
  else
    used_elsewhere_.push_back(block);
}

int64_t CachingAllocator::size_of(uintptr_t address) const { return in_use_.at(address)->size; }

void CachingAllocator::record_stream(uintptr_t address, int64_t stream) {
  const auto found = in_use_.find(address);
  // Not the beginning of a block: memory that belongs to someone else.
  if (found != in_use_.end() && found->second->stream != stream) found->second->other_streams.insert(stream);
}

void CachingAllocator::reset_peaks() {
  for (Bytes* bytes : {&allocated_, &active_, &reserved_}) bytes->peak = bytes->now;
}

void CachingAllocator::release_used_elsewhere() {
  for (Block* block : std::exchange(used_elsewhere_, {})) {
    block->other_streams.clear();
    release(block);
  }
}

// A block counts as large as it can get, so that the end of a segment is taken last.
CachingAllocator::Block* CachingAllocator::take_free(Pool& pool, int64_t size, int64_t stream) {
  Block key{.stream = stream, .size = size};
  auto it = pool.free.lower_bound(&key);
  if (it == pool.free.end() || (*it)->stream != stream) return nullptr;
  const auto size_to_be = [](const Block* block) {
    return block->size + (block->next && !block->next->is_mapped ? block->next->size : 0);
  };
  for (auto next = std::next(it);
       next != pool.free.end() && (*next)->stream == stream && size_to_be(*next) < size_to_be(*it); ++next)
    it = next;
  Block* block = *it;
  pool.free.erase(it);
  return block;
}

bool CachingAllocator::reserve(int64_t bytes) {
  if (reserved_.now + bytes > options_.device_bytes) return false;
  add(reserved_, bytes);
  return true;
}

// Starts from a free block before unmapped addresses, if there is one, and maps what is missing.
CachingAllocator::Block* CachingAllocator::expanded(Pool& pool, int64_t size, int64_t stream) {
  Block* block = room_to_expand(pool, size, stream);
  if (!block->is_mapped && !map(block, std::min(block->size, size))) return nullptr;
  while (block->size < size) {
    Block* next = block->next;
    if (!map(next, std::min(size - block->size, next->size))) return nullptr;
    block = next;
  }
  pool.free.erase(block);
  return block;
}

CachingAllocator::Block* CachingAllocator::room_to_expand(Pool& pool, int64_t size, int64_t stream) {
  const auto has_room = [size](const Block* block) {
    int64_t bytes = 0;
    for (; block && block->is_free() && bytes < size; block = block->next) bytes += block->size;
    return bytes >= size;
  };
  Block key{.stream = stream};
  for (auto it = pool.unmapped.lower_bound(&key); it != pool.unmapped.end() && (*it)->stream == stream;
       ++it) {
    Block* block = *it;
    if (block->previous && block->previous->is_free()) block = block->previous;
    if (has_room(block)) return block;
  }
  const int64_t bytes = rounded_up(options_.device_bytes + options_.device_bytes / 8, pool.granularity());
  auto* block = new Block{.pool = &pool,
                          .stream = stream,
                          .address = next_address_,
                          .size = bytes,
                          .is_mapped = false,
                          .segment = next_address_};
  blocks_.insert(block);
  next_address_ += static_cast<uintptr_t>(bytes);
  pool.unmapped.insert(block);
  return block;
}

// Maps whole pieces of the segment, so perhaps more than `size`.
bool CachingAllocator::map(Block* block, int64_t size) {
  Pool& pool = *block->pool;
  const auto offset = static_cast<int64_t>(block->address - block->segment);
  const int64_t mapped = rounded_up(offset + size, pool.granularity()) - offset;
  if (!reserve(mapped)) return false;
  pool.unmapped.erase(block);
  block->is_mapped = true;
  if (mapped < block->size) {
    auto* rest = new Block(*block);
    rest->is_mapped = false;
    rest->address += static_cast<uintptr_t>(mapped);
    rest->size -= mapped;
    rest->previous = block;
    if (rest->next) rest->next->previous = rest;
    block->next = rest;
    block->size = mapped;
    blocks_.insert(rest);
    pool.unmapped.insert(rest);
  }
  merge(block, block->previous);
  merge(block, block->next);
  pool.free.insert(block);
  return true;
}

// Returns the first part; the rest is free.
CachingAllocator::Block* CachingAllocator::split(Block* rest, int64_t size) {
  auto* block = new Block(*rest);
  blocks_.insert(block);
  block->size = size;
  block->next = rest;
  if (block->previous) block->previous->next = block;
  rest->previous = block;
  rest->address += static_cast<uintptr_t>(size);
  rest->size -= size;
  rest->pool->free.insert(rest);
  return block;
}

// `other` may be null, in use, or unmapped.
void CachingAllocator::merge(Block* into, Block* other) {
  if (!other || !other->is_free() || other->is_mapped != into->is_mapped) return;
  Pool& pool = *into->pool;
  if (other->is_mapped)
    pool.free.erase(other);
  else
    pool.unmapped.erase(other);
  if (other == into->previous) {
    into->address = other->address;
    into->previous = other->previous;
    if (into->previous) into->previous->next = into;
  } else {
    into->next = other->next;
    if (into->next) into->next->previous = into;
  }
  into->size += other->size;
  blocks_.erase(other);
  delete other;
}

void CachingAllocator::release(Block* block) {
  add(active_, -block->size);
  merge(block, block->previous);
  merge(block, block->next);
  block->pool->free.insert(block);
}

void CachingAllocator::empty_cache() {
  release_used_elsewhere();
  for (Pool* pool : {&usual_->large, &usual_->small})
    for (Block* block : std::vector<Block*>(pool->free.begin(), pool->free.end())) unmap(block);
}

// Gives back the whole pieces of the segment that the block covers.
void CachingAllocator::unmap(Block* block) {
  Pool& pool = *block->pool;
  const auto begin = static_cast<int64_t>(block->address - block->segment);
  const int64_t first = rounded_up(begin, pool.granularity()),
                last = (begin + block->size) / pool.granularity() * pool.granularity();
  if (last <= first) return;
  pool.free.erase(block);
  const auto part = [&](int64_t from, int64_t to) {
    auto* made = new Block(*block);
    made->address = block->segment + static_cast<uintptr_t>(from);
    made->size = to - from;
    blocks_.insert(made);
    return made;
  };
  const int64_t end = begin + block->size;
  if (first > begin) {
    Block* before = part(begin, first);
    if (before->previous) before->previous->next = before;
    before->next = block;
    block->previous = before;
    pool.free.insert(before);
  }
  if (last < end) {
    Block* after = part(last, end);
    if (after->next) after->next->previous = after;
    after->previous = block;
    block->next = after;
    pool.free.insert(after);
  }
  block->address = block->segment + static_cast<uintptr_t>(first);
  block->size = last - first;
  block->is_mapped = false;
  add(reserved_, -block->size);
  merge(block, block->previous);
  merge(block, block->next);
  pool.unmapped.insert(block);
}

}  // namespace titan::plan
