#include "runtime/memory.h"

#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "runtime/counters.h"
#include "runtime/device.h"
#include "runtime/faults.h"
#include "runtime/races.h"
#include "runtime/unwritten.h"

namespace virtual_gpu {
namespace {

std::map<uintptr_t, Block>& blocks() {
  static auto* b = new std::map<uintptr_t, Block>;
  return *b;
}

struct Part {
  size_t bytes = 0;
};
std::map<uintptr_t, Part>& parts() {
  static auto* p = new std::map<uintptr_t, Part>;
  return *p;
}

// The entry of a map by address that contains this one.
template <class Map>
typename Map::iterator find_in(Map& map, const void* address) {
  const auto at = reinterpret_cast<uintptr_t>(address);
  auto next = map.upper_bound(at);
  if (next == map.begin()) return map.end();
  --next;
  return at < next->first + next->second.bytes ? next : map.end();
}

// Empty for memory that LibTorch's allocator has not handed out. A part may go over the ends of blocks, in an expandable segment.
Range allocation_with(const void* address) {
  const auto range = [](uintptr_t begin, size_t bytes) {
    return Range{reinterpret_cast<const void*>(begin), bytes};
  };
  if (const auto part = find_in(parts(), address); part != parts().end())
    return range(part->first, part->second.bytes);
  const auto block = find_in(blocks(), address);
  if (block == blocks().end() || block->second.has_parts) return {};
  return range(block->first, block->second.bytes);
}

std::map<int, size_t>& used_bytes() {
  static auto* u = new std::map<int, size_t>;
  return *u;
}

constexpr size_t page_bytes = size_t{2} << 20;
size_t whole_pages(size_t bytes) { return (bytes + page_bytes - 1) / page_bytes * page_bytes; }

bool is_device_memory(const void* address) {
  const Block* block = find_block(address);
  return block && !block->is_pinned_host;
}

cudaError_t allocate(void** address, size_t bytes, bool is_pinned_host) {
  Lock lock(state().mutex);
  if (const cudaError_t error = check_no_capture()) return error;
  *address = nullptr;
  if (bytes == 0) return cudaSuccess;
  *address = reserve(bytes);
  if (!*address) return fail(cudaErrorMemoryAllocation);
  if (!is_pinned_host && !take_memory("cudaMalloc", current_device(), bytes)) {
    release(*address, bytes);
    *address = nullptr;
    return fail(cudaErrorMemoryAllocation);
  }
  add_block(*address, {.bytes = bytes, .device = current_device(), .is_pinned_host = is_pinned_host});
  return cudaSuccess;
}

cudaError_t give_back(void* address, bool is_pinned_host, const char* call) {
  need_context(call);
  Lock lock(state().mutex);
  if (!address) return cudaSuccess;
  if (const cudaError_t error = check_no_capture()) return error;
  const auto found = blocks().find(reinterpret_cast<uintptr_t>(address));
  if (found == blocks().end() || found->second.is_pinned_host != is_pinned_host)
    return fail(cudaErrorInvalidValue);
  const Block block = found->second;
  count_host_wait(call);
  wait_for_device(lock, block.device);
  host_has_seen_device(block.device);
  if (!is_pinned_host) return_memory(block.device, block.bytes);
  forget_range(address, block.bytes);
  remove_block(address);
  release(address, block.bytes);
  return cudaSuccess;
}

// Bytes that a copy has brought to pinned memory, and the host doesn't see yet; in the order in which the copies ran.
struct Arrival {
  char* to = nullptr;
  std::vector<char> bytes;
  int stream = 0;
  uint64_t number = 0;

  bool overlaps(const void* data, size_t size) const {
    const auto* begin = static_cast<const char*>(data);
    return to < begin + size && begin < to + bytes.size();
  }
};
std::vector<Arrival>& arrivals() {
  static auto* a = new std::vector<Arrival>;
  return *a;
}
void arrive(const Arrival& arrival) { std::memcpy(arrival.to, arrival.bytes.data(), arrival.bytes.size()); }

// On the scheduler's thread.
void copy_to_pinned(char* to, const char* from, size_t bytes) {
  const Stamp* stamp = running_stamp();
  if (!stamp) {  // nobody looks at the order of operations
    std::memmove(to, from, bytes);
    return;
  }
  Arrival arrival{to, {from, from + bytes}, stamp->stream, stamp->number};
  const Lock lock(state().mutex);
  const Block* block = find_block(to);
  if (block && block->is_pinned_host) arrivals().push_back(std::move(arrival));
}

Range range_of(const void* address, size_t bytes, bool is_written) {
  Lock lock(state().mutex);
  // The host's other memory is not the device's business: the driver copies it before the call returns.
  return find_block(address) ? Range{address, bytes, is_written} : Range{};
}

cudaError_t copy(void* to, const void* from, size_t bytes, cudaStream_t stream, const char* name) {
  if (bytes == 0) return cudaSuccess;
  bool from_pageable = false;
  bool to_pageable = false;
  bool from_device = false;
  bool to_device = false;
  {
    Lock lock(state().mutex);
    from_pageable = !find_block(from);
    to_pageable = !find_block(to);
    from_device = is_device_memory(from);
    to_device = is_device_memory(to);
    const Stream& on = stream_of(stream);
    if (const cudaError_t error = check_capture(on)) return error;
    if (on.capture && !from_pageable && !from_device && !state().settings.graphs_read_host) {
      std::fprintf(stderr, "virtual GPU: a graph is recorded that reads %zu bytes of the host's memory\n",
                   bytes);
      return break_capture(*on.capture, cudaErrorStreamCaptureUnsupported);
    }
    if ((from_pageable || to_pageable) && on.capture)
      return break_capture(*on.capture, cudaErrorStreamCaptureUnsupported);
  }
  // In memory-only mode, nothing is written to the device, and what comes from it is zeros.
  const bool computed = computes() || bytes <= small_bytes;
  Operation operation{name, {range_of(from, bytes, false), range_of(to, bytes, true)}, {}};
  operation.ranges[1].arrives_later = computed && !to_pageable && !to_device;
  std::erase_if(operation.ranges, [](const Range& range) { return range.bytes == 0; });
  std::function<void()> work = [=] {
    if (computed && !to_pageable && !to_device)
      copy_to_pinned(static_cast<char*>(to), static_cast<const char*>(from), bytes);
    else if (computed)
      std::memmove(to, from, bytes);
    else if (!to_device)
      std::memset(to, 0, bytes);
  };
  if (from_pageable && to_device) {
    // As the driver does: the bytes are staged before the call returns.
    if (computed) {
      auto staged = std::make_shared<std::vector<char>>(static_cast<const char*>(from),
                                                        static_cast<const char*>(from) + bytes);
      work = [to, staged] { std::memcpy(to, staged->data(), staged->size()); };
    } else {
      work = [] {};
    }
  }
  operation = computation(operation.name, operation.ranges, std::move(work));
  if (const cudaError_t error = submit(stream, std::move(operation))) return error;
  if (to_pageable && from_device)
    wait_for(stream, name);  // a copy to pageable memory ends before the call returns
  return cudaSuccess;
}

void*& library_of_kernels() {
  static void* library = nullptr;
  return library;
}

}  // namespace

// The kernels replace LibTorch's own, so they are loaded after LibTorch's are registered and before the first one
// runs: when it asks for its device. Their library's constructor does so, too.
void load_kernels() {
  static std::once_flag once;
  static thread_local bool is_loading = false;
  if (std::exchange(is_loading, true)) return;
  std::call_once(once, [] {
    find_allocator();
    const char* path = std::getenv("VIRTUAL_GPU_KERNELS");
    if (!path) return;
    library_of_kernels() = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library_of_kernels()) not_supported(dlerror(), "VIRTUAL_GPU_KERNELS can't be loaded.");
  });
  is_loading = false;
}

void begin_allocating() {
  load_kernels();
  static std::once_flag once;
  std::call_once(once, [] {
    if (!library_of_kernels()) return;
    reinterpret_cast<void (*)()>(dlsym(library_of_kernels(), "virtual_gpu_watch_allocator"))();
  });
}

bool take_memory(const char* call, int device, size_t bytes) {
  size_t& used = used_bytes()[device];
  if (used + bytes > usable_bytes()) return false;
  used += bytes;
  count_allocation(call, bytes);
  return true;
}
void return_memory(int device, size_t bytes) { used_bytes()[device] -= bytes; }

const Block* find_block(const void* address) {
  const auto found = find_in(blocks(), address);
  return found == blocks().end() ? nullptr : &found->second;
}
void add_block(const void* address, Block block) { blocks()[reinterpret_cast<uintptr_t>(address)] = block; }
void remove_block(const void* address) {
  const auto found = blocks().find(reinterpret_cast<uintptr_t>(address));
  if (found == blocks().end()) return;
  forget_unwritten(address, found->second.bytes);
  if (found->second.is_pinned_host) deliver_to({{address, found->second.bytes}});
  parts().erase(parts().lower_bound(found->first), parts().lower_bound(found->first + found->second.bytes));
  blocks().erase(found);
}

void deliver(const Clock& known) {
  std::erase_if(arrivals(), [&](const Arrival& arrival) {
    if (known[arrival.stream] < arrival.number) return false;
    arrive(arrival);
    return true;
  });
}
void deliver_to(const std::vector<Range>& ranges) {
  const auto is_used = [&](const Arrival& arrival) {
    return std::ranges::any_of(ranges, [&](const Range& range) {
      return !range.arrives_later && arrival.overlaps(range.data, range.bytes);
    });
  };
  // With all before the last one that is used, so that each byte gets its newest value.
  const auto last = std::find_if(arrivals().rbegin(), arrivals().rend(), is_used);
  for (auto arrival = arrivals().begin(); arrival != last.base(); ++arrival) arrive(*arrival);
  arrivals().erase(arrivals().begin(), last.base());
}

Range find_allocation(const void* address) {
  const Lock lock(state().mutex);
  const Range found = allocation_with(address);
  if (const Block* block = find_block(address); block && block->is_pinned_host) deliver_to({found});
  return found;
}

void check_ends(const Operation& operation) {
  if (operation.is_bookkeeping) return;  // it is what makes the parts
  for (const Range& range : operation.ranges) {
    if (range.bytes == 0) continue;
    const Range allocation = allocation_with(range.data);
    const auto* end = static_cast<const char*>(range.data) + range.bytes;
    const auto* allowed = static_cast<const char*>(allocation.data) + allocation.bytes;
    if (!allocation.data || end <= allowed) continue;
    const std::string& name = operation.label ? *operation.label : operation.name;
    report_fault(
        "virtual GPU: %s %s %zu bytes at %p, the last %td of them outside the allocation of %zu bytes "
        "at %p\n",
        name.c_str(), range.is_written ? "writes" : "reads", range.bytes, range.data, end - allowed,
        allocation.bytes, allocation.data);
    if (operation.stamp && operation.stamp->calls) print_calls(*operation.stamp->calls);
    std::abort();
  }
}

void note_part(const void* address, size_t bytes, bool is_handed_out) {
  const Lock lock(state().mutex);
  const auto block = find_in(blocks(), address);
  if (block == blocks().end()) return;  // freed meanwhile
  block->second.has_parts = true;
  note_unwritten(address, bytes, !is_handed_out);
  const auto begin = reinterpret_cast<uintptr_t>(address);
  if (!is_handed_out) {
    parts().erase(begin);
    return;
  }
  // A graph's later launches hand out memory that holds the results of the one before.
  if (const auto before = find_in(parts(), address); before != parts().end()) parts().erase(before);
  parts().erase(parts().lower_bound(begin), parts().lower_bound(begin + bytes));
  parts()[begin] = {bytes};
}

bool is_of_several_pieces(const void* data, size_t bytes) {
  const Lock lock(state().mutex);
  const Block* const first = find_block(data);
  return bytes > 0 && first && first->is_mapped &&
         find_block(static_cast<const char*>(data) + bytes - 1) != first;
}

void* reserve(size_t bytes) {
  void* address = mmap(nullptr, whole_pages(bytes), PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return address == MAP_FAILED ? nullptr : address;
}
void release(void* address, size_t bytes) { munmap(address, whole_pages(bytes)); }

}  // namespace virtual_gpu

using namespace virtual_gpu;

extern "C" {

cudaError_t cudaMalloc(void** address, size_t bytes) {
  need_context("cudaMalloc");
  begin_allocating();
  return allocate(address, bytes, false);
}
cudaError_t cudaFree(void* address) { return give_back(address, false, "cudaFree"); }
cudaError_t cudaMallocAsync(void** address, size_t bytes, cudaStream_t) { return cudaMalloc(address, bytes); }
cudaError_t cudaFreeAsync(void* address, cudaStream_t) { return cudaFree(address); }
cudaError_t cudaHostAlloc(void** address, size_t bytes, unsigned) {
  need_context("cudaHostAlloc");
  return allocate(address, bytes, true);
}
cudaError_t cudaMallocHost(void** address, size_t bytes) { return cudaHostAlloc(address, bytes, 0); }
cudaError_t cudaFreeHost(void* address) { return give_back(address, true, "cudaFreeHost"); }

cudaError_t cudaHostRegister(void* address, size_t bytes, unsigned) {
  need_context("cudaHostRegister");
  Lock lock(state().mutex);
  if (find_block(address)) return fail(cudaErrorHostMemoryAlreadyRegistered);
  add_block(address, {.bytes = bytes, .device = current_device(), .is_pinned_host = true});
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* address) {
  Lock lock(state().mutex);
  const Block* block = find_block(address);
  if (!block) return fail(cudaErrorHostMemoryNotRegistered);
  forget_range(address, block->bytes);
  remove_block(address);
  return cudaSuccess;
}
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  *device = host;
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  need_context("cudaMemGetInfo");
  Lock lock(state().mutex);
  *total = total_bytes();
  *free = usable_bytes() - used_bytes()[current_device()];
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  Lock lock(state().mutex);
  *attributes = {};
  const Block* block = find_block(address);
  auto* pointer = const_cast<void*>(address);
  if (!block) {
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->device = -2;
    attributes->hostPointer = pointer;
    return cudaSuccess;
  }
  attributes->type = block->is_pinned_host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  attributes->device = block->device;
  attributes->devicePointer = pointer;
  attributes->hostPointer = block->is_pinned_host ? pointer : nullptr;
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  return copy(to, from, bytes, stream, "cudaMemcpyAsync");
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  {
    const Lock lock(state().mutex);
    if (const cudaError_t error = check_no_capture()) return error;
  }
  if (const cudaError_t error = copy(to, from, bytes, nullptr, "cudaMemcpy")) return error;
  return cudaStreamSynchronize(nullptr);
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
  return copy(to, from, bytes, stream, "cudaMemcpyPeerAsync");
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind, cudaStream_t stream) {
  for (size_t row = 0; row < height; ++row) {
    const cudaError_t error =
        copy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch,
             width, stream, "cudaMemcpy2DAsync");
    if (error) return error;
  }
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* address, int value, size_t bytes, cudaStream_t stream) {
  return submit(stream, computation("cudaMemsetAsync", {{address, bytes, true}}, [=] {
                  if (computes() || bytes <= small_bytes) std::memset(address, value, bytes);
                }));
}
cudaError_t cudaMemset(void* address, int value, size_t bytes) {
  return cudaMemsetAsync(address, value, bytes, nullptr);
}

// Memory pools exist, and have nothing to set: cudaMallocAsync allocates at once.
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) {
  static char the_pool;
  *pool = reinterpret_cast<cudaMemPool_t>(&the_pool);
  return cudaSuccess;
}
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* value) {
  std::memset(value, 0, sizeof(uint64_t));
  return cudaSuccess;
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) { return cudaSuccess; }
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }

}  // extern "C"
