#include "tensor/pages.h"

#include <sys/mman.h>

#include <cstdint>
#include <new>

namespace titan {

namespace {

constexpr size_t kPage = 4096;
constexpr size_t kHugePage = size_t{2} << 20;

}  // namespace

size_t whole_pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

// A huge page has to begin at a multiple of its size: more is mapped than needed, and the ends go back.
Pages map_pages(size_t bytes) {
  bytes = whole_pages(bytes);
  const size_t slack = bytes >= kHugePage ? kHugePage : 0;
  void* mapped =
      ::mmap(nullptr, bytes + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, /*fd=*/-1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  char* begin = static_cast<char*>(mapped);
  if (slack > 0) {
    const size_t before = (kHugePage - reinterpret_cast<uintptr_t>(begin) % kHugePage) % kHugePage;
    if (before > 0) ::munmap(begin, before);
    begin += before;
    if (slack > before) ::munmap(begin + bytes, slack - before);
    ::madvise(begin, bytes, MADV_HUGEPAGE);  // a kernel without them says no, and small ones do
  }
  return {begin, bytes};
}

void unmap_pages(const Pages& pages) { ::munmap(pages.begin, pages.bytes); }

}  // namespace titan
