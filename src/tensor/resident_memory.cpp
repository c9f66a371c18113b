#include "tensor/resident_memory.h"

#include <sys/mman.h>
#include <new>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StorageImpl.h>

#include "tensor/memory_history.h"

namespace titan {

namespace {

constexpr size_t kPage = 4096;
constexpr size_t kHugePage = size_t{2} << 20;

class OutOfMemory final : public std::bad_alloc {
 public:
  explicit OutOfMemory(size_t bytes)
      : message_("out of memory: the host has no " + std::to_string(bytes) + " more bytes") {}
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  std::string message_;
};

}  // namespace

size_t whole_pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

// A huge page must begin at a multiple of its size: more is mapped than needed, and the ends go back.
Pages map_pages(size_t bytes) {
  bytes = whole_pages(bytes);
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
    ::madvise(begin, bytes, MADV_HUGEPAGE);  // a kernel without them refuses, and small ones serve
  }
  if (MemoryHistory* history = memory_history()) history->mapped(begin, bytes);
  return {begin, bytes};
}

void unmap_pages(const Pages& pages) {
  if (MemoryHistory* history = memory_history()) history->unmapped(pages.begin);
  ::munmap(pages.begin, pages.bytes);
}

namespace {

// Below it, the rest of a page and a system call cost more than a hole in the heap.
constexpr size_t kSmallestMapping = size_t{1} << 20;

#if defined(__SANITIZE_ADDRESS__)
constexpr bool kMapped = false;  // it checks the ends only of malloc's blocks
#else
constexpr bool kMapped = true;
#endif

void unmap(void* context) {
  auto* pages = static_cast<Pages*>(context);
  if (MemoryHistory* history = memory_history()) history->freed(pages->begin);
  unmap_pages(*pages);
  delete pages;
}

at::DataPtr mapped_memory(size_t bytes) {
  const Pages pages = map_pages(bytes);
  if (MemoryHistory* history = memory_history()) history->allocated(pages.begin, bytes);
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

}  // namespace titan
