#include "tensor/memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <list>
#include <mutex>
#include <new>
#include <string>
#include <unordered_map>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StorageImpl.h>
#include <torch/csrc/autograd/variable.h>

#include "tensor/memory_history.h"
#include "titan/core/error.h"

namespace titan {

namespace {

struct Pages {
  char* begin = nullptr;
  size_t bytes = 0;
};

constexpr size_t kPage = 4096;
constexpr size_t kHugePage = size_t{2} << 20;

class OutOfMemory final : public std::bad_alloc {
 public:
  explicit OutOfMemory(size_t bytes)
      : message_("out of memory: cannot allocate " + std::to_string(bytes) + " bytes on the host") {}
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  std::string message_;
};

size_t whole_pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

// Maps at least `bytes`, zeroed, as huge pages if possible; a block that contains one begins at a huge page.
// Memory is occupied when first touched. Throws a std::bad_alloc that names the size.
Pages map_pages(size_t bytes) {
  bytes = whole_pages(bytes);
  // A huge page must begin at a multiple of its size, so more is mapped than needed, and the ends are
  // unmapped.
  const size_t slack = bytes >= kHugePage ? kHugePage : 0;
  void* mapped =
      ::mmap(nullptr, bytes + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, /*fd=*/-1, 0);
  if (mapped == MAP_FAILED) {
    if (MemoryHistory* history = memory_history()) history->out_of_memory(bytes);
    throw OutOfMemory(bytes);
  }
  char* begin = static_cast<char*>(mapped);
  if (slack > 0) {
    const size_t before = (kHugePage - reinterpret_cast<uintptr_t>(begin) % kHugePage) % kHugePage;
    if (before > 0) ::munmap(begin, before);
    begin += before;
    if (slack > before) ::munmap(begin + bytes, slack - before);
    ::madvise(begin, bytes, MADV_HUGEPAGE);  // fails on kernels without huge pages, which use small ones
  }
  if (MemoryHistory* history = memory_history()) history->mapped(begin, bytes);
  return {begin, bytes};
}

void unmap_pages(const Pages& pages) {
  if (MemoryHistory* history = memory_history()) history->unmapped(pages.begin);
  ::munmap(pages.begin, pages.bytes);
}

// Below this size, the unused part of a page and a system call cost more than a hole in the heap.
constexpr size_t kSmallestMapping = size_t{1} << 20;

#if defined(__SANITIZE_ADDRESS__)
constexpr bool kMapped = false;  // AddressSanitizer checks only malloc's blocks
#else
constexpr bool kMapped = true;
#endif

// LibTorch's memory profilers see these tensors, too.
void report(const Pages& pages, int64_t bytes) {
  c10::reportMemoryUsageToProfiler(pages.begin, bytes, 0, 0, at::kCPU);
}

void unmap(void* context) {
  auto* pages = static_cast<Pages*>(context);
  if (MemoryHistory* history = memory_history()) history->freed(pages->begin);
  report(*pages, -static_cast<int64_t>(pages->bytes));
  unmap_pages(*pages);
  delete pages;
}

at::DataPtr mapped_memory(size_t bytes) {
  const Pages pages = map_pages(bytes);
  if (MemoryHistory* history = memory_history()) history->allocated(pages.begin, bytes);
  report(pages, static_cast<int64_t>(pages.bytes));
  return {pages.begin, new Pages(pages), &unmap, at::kCPU};
}

bool is_mapped(size_t bytes, at::Device device) {
  return kMapped && device.is_cpu() && bytes >= kSmallestMapping;
}

size_t bytes_of(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return static_cast<size_t>(c10::multiply_integers(sizes)) * options.dtype().itemsize();
}

at::Tensor mapped_tensor(at::IntArrayRef sizes, size_t bytes, const at::TensorOptions& options) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, mapped_memory(bytes), /*allocator=*/nullptr,
                       /*resizable=*/false);
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), options.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

}  // namespace

at::DataPtr resident_memory(size_t bytes, at::Device device) {
  if (is_mapped(bytes, device)) return mapped_memory(bytes);
  const c10::OptionalDeviceGuard on_device(device);
  return c10::GetAllocator(device.type())->allocate(bytes);
}

at::Tensor resident_zeros(at::IntArrayRef sizes, const at::TensorOptions& options) {
  const size_t bytes = bytes_of(sizes, options);
  return is_mapped(bytes, options.device()) ? mapped_tensor(sizes, bytes, options)
                                            : at::zeros(sizes, options);
}

at::Tensor resident_empty(at::IntArrayRef sizes, const at::TensorOptions& options) {
  const size_t bytes = bytes_of(sizes, options);
  return is_mapped(bytes, options.device()) ? mapped_tensor(sizes, bytes, options)
                                            : at::empty(sizes, options);
}

// ---- the tensors of a step

namespace {

constexpr size_t kSmallest = size_t{1} << 20;
constexpr size_t kSlack = size_t{64} << 20;
// The smallest part of a kept block that a request may use.
constexpr double kSmallestUse = 0.9;

class HostAllocator final : public c10::Allocator {
 public:
  at::DataPtr allocate(size_t bytes) override {
    if (bytes < kSmallest) return c10::GetDefaultCPUAllocator()->allocate(bytes);
    char* begin = take(whole_pages(bytes));
    return {begin, begin, &free_block, at::kCPU};
  }
  // LibTorch's matrix products allocate and free by raw pointers.
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
      // If a process's memory is limited (ulimit -v, a cgroup), unmapping kept blocks may be enough.
      if (kept_.empty()) throw;
      while (!kept_.empty()) drop_oldest();
      pages = map_pages(bytes);
    }
    ++stats_.num_mappings;
    return pages;
  }

  // Takes the smallest block that is large enough. Among equals it is the one freed last, whose pages may be
  // cached.
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

  /// Returns false for a block that isn't from this allocator.
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

// ---- tensors whose memory comes and goes

c10::StorageImpl* storage_impl(const at::Tensor& tensor) { return tensor.storage().unsafeGetStorageImpl(); }

// The deleter of a DataPtr whose context is a counted reference to the owner's storage. It keeps the storage
// alive without an extra allocation.
void release_owner(void* context) {
  c10::intrusive_ptr<c10::StorageImpl>::reclaim(static_cast<c10::StorageImpl*>(context));
}

}  // namespace

void install_host_allocator() { c10::SetCPUAllocator(&allocator(), /*priority=*/1); }

HostMemoryStats host_memory_stats() { return allocator().stats(); }

at::Tensor deferred_tensor(at::IntArrayRef sizes, const at::TensorOptions& options) {
  at::Tensor tensor = at::empty({0}, options);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

at::Tensor bits_of(const at::Tensor& tensor) {
  const auto integer = [&] {
    switch (tensor.element_size()) {
      case 1:
        return at::kByte;
      case 2:
        return at::kShort;
      case 4:
        return at::kInt;
      default:
        return at::kLong;
    }
  };
  return tensor.view(-1).view(integer());
}

at::Tensor part_of(const at::Tensor& whole, int64_t offset, at::IntArrayRef sizes) {
  TITAN_INTERNAL_ASSERT(
      whole.dim() == 1 && offset >= 0 && offset + c10::multiply_integers(sizes) <= whole.numel(), "part [",
      offset, ", +", c10::multiply_integers(sizes), ") of ", whole.numel(), " elements");
  at::Tensor part =
      at::detail::make_tensor<c10::TensorImpl>(c10::Storage(whole.storage()), whole.key_set(), whole.dtype());
  part.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  part.unsafeGetTensorImpl()->set_storage_offset(whole.storage_offset() + offset);
  torch::autograd::impl::set_version_counter(part, torch::autograd::impl::version_counter(whole));
  return part;
}

bool is_deferred(const at::Tensor& tensor) { return tensor.numel() > 0 && tensor.storage().nbytes() == 0; }

namespace param_storage {

void allocate(const at::Tensor& tensor) {
  c10::StorageImpl* storage = storage_impl(tensor);
  TITAN_INTERNAL_ASSERT(storage->nbytes() == 0, "allocate: the storage holds ", storage->nbytes(), " bytes");
  TITAN_INTERNAL_ASSERT(tensor.storage_offset() == 0, "allocate: the tensor is a part of its storage");
  const size_t bytes = tensor.nbytes();
  storage->set_data_ptr_noswap(resident_memory(bytes, tensor.device()));
  storage->set_nbytes(bytes);
}

void bind(const at::Tensor& tensor, const at::Tensor& owner, int64_t byte_offset) {
  c10::StorageImpl* storage = storage_impl(tensor);
  c10::StorageImpl* memory = storage_impl(owner);
  const auto first =
      static_cast<size_t>(owner.storage_offset()) * owner.element_size() + static_cast<size_t>(byte_offset);
  const size_t bytes = tensor.nbytes();
  TITAN_INTERNAL_ASSERT(first + bytes <= memory->nbytes(), "bind: bytes ", first, " to ", first + bytes,
                        " of ", memory->nbytes());
  char* data = owner.device().is_meta() ? nullptr : static_cast<char*>(memory->mutable_data()) + first;
  void* context = c10::intrusive_ptr<c10::StorageImpl>(owner.storage().getWeakStorageImpl().lock()).release();
  storage->set_data_ptr_noswap(at::DataPtr(data, context, &release_owner, owner.device()));
  storage->set_nbytes(bytes);
}

void free(const at::Tensor& tensor) {
  c10::StorageImpl* storage = storage_impl(tensor);
  storage->set_data_ptr_noswap(at::DataPtr(nullptr, tensor.device()));
  storage->set_nbytes(static_cast<size_t>(0));
}

int64_t bytes(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.storage().nbytes()); }

}  // namespace param_storage

}  // namespace titan
