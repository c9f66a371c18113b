#include "fuzz.h"

#include <sanitizer/allocator_interface.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>

namespace titan::fuzz {
namespace {

// A parser may allocate memory in proportion to a file's size, but not to a size that the file claims: while
// an input is parsed, an allocation may be at most twice the input's size, or this.
constexpr size_t kAlwaysAllowed = size_t{1} << 20;

std::atomic<size_t> limit{SIZE_MAX};

void check_allocation(const volatile void*, size_t size) {
  if (size <= limit) return;
  const size_t allowed = limit.exchange(SIZE_MAX);  // a report may need memory itself
  std::fprintf(stderr, "an allocation of %zu bytes; at most %zu are allowed for this input\n", size, allowed);
  std::abort();
}

void ignore_free(const volatile void*) {}

}  // namespace

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::abort();
}

void require_refusal(const Error& error, std::string_view file) {
  const std::string_view message = error.what();
  if (dynamic_cast<const InternalError*>(&error) == nullptr && message.find(file) != message.npos) return;
  std::fprintf(stderr, "the error: %s\n", error.what());
  require(false, "a refusal names the file and isn't an internal error");
}

}  // namespace titan::fuzz

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  return __sanitizer_install_malloc_and_free_hooks(titan::fuzz::check_allocation, titan::fuzz::ignore_free) >
                 0
             ? 0
             : 1;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace titan::fuzz;
  limit = std::max(2 * size, kAlwaysAllowed);
  fuzz_input({reinterpret_cast<const char*>(data), size});
  limit = SIZE_MAX;
  return 0;
}
