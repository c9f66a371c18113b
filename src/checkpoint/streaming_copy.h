#pragma once

// memcpy of more than the caches hold until somebody reads it again.

#include <cstddef>

namespace titan::checkpoint::detail {

/// As std::memcpy, but stores go past the caches: a line isn't read before it is written, which is a third of
/// the memory's traffic. (glibc does the same only from a size on that it takes from the machine: 252 MB on
/// one with 320 MB of cache.) Done when it returns, for other threads that hear of it too.
void streaming_copy(void* to, const void* from, size_t num_bytes);

}  // namespace titan::checkpoint::detail
