#include "tensor/pages.h"

#include <sys/mman.h>

#include <cstdint>
#include <new>
#include <string>

#include "tensor/memory_history.h"

namespace titan {

namespace {

constexpr size_t kPage = 4096;
constexpr size_t kHugePage = size_t{2} << 20;

class OutOfMemory final : public std::bad_alloc {
 public:
  explicit OutOfMemory(size_t bytes)
      : message_("out of memory: the host hasn't " + std::to_string(bytes) + " bytes more") {}
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  std::string message_;
};

}  // namespace

size_t whole_pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

// A huge page has to begin at a multiple of its size: more is mapped than needed, and the ends go back.
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
    ::madvise(begin, bytes, MADV_HUGEPAGE);  // a kernel without them says no, and small ones do
  }
  if (MemoryHistory* history = memory_history()) history->mapped(begin, bytes);
  return {begin, bytes};
}

void unmap_pages(const Pages& pages) {
  if (MemoryHistory* history = memory_history()) history->unmapped(pages.begin);
  ::munmap(pages.begin, pages.bytes);
}

}  // namespace titan
