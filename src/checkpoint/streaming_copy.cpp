#include "streaming_copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace titan::checkpoint::detail {

#ifdef __SSE2__

void streaming_copy(void* to, const void* from, size_t num_bytes) {
  constexpr size_t line = 64, word = sizeof(__m128i);
  auto* target = static_cast<char*>(to);
  const auto* source = static_cast<const char*>(from);
  const size_t head = std::min(num_bytes, (line - reinterpret_cast<uintptr_t>(target) % line) % line);
  std::memcpy(target, source, head);
  size_t done = head;
  for (; done + line <= num_bytes; done += line) {
    for (size_t i = 0; i < line; i += word) {
      const __m128i value = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + done + i));
      _mm_stream_si128(reinterpret_cast<__m128i*>(target + done + i), value);
    }
  }
  _mm_sfence();
  std::memcpy(target + done, source + done, num_bytes - done);
}

#else

void streaming_copy(void* to, const void* from, size_t num_bytes) { std::memcpy(to, from, num_bytes); }

#endif

}  // namespace titan::checkpoint::detail
