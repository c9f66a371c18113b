#pragma once

// Memory straight from the kernel.

#include <cstddef>

namespace titan {

struct Pages {
  char* begin = nullptr;
  size_t bytes = 0;
};

size_t whole_pages(size_t bytes);
/// At least `bytes`, zero, beginning at a huge page where it holds one; huge ones are asked for. Takes room
/// when first touched. Throws a std::bad_alloc
/// that says how much it was.
Pages map_pages(size_t bytes);
void unmap_pages(const Pages& pages);

}  // namespace titan
