#pragma once

#include <cstddef>
#include <functional>

namespace titan::checkpoint::detail {

/// Calls task(0) ... task(count - 1) on up to `num_threads` threads, the caller's among them; returns when
/// all are done. Behind the first that throws no other begins, and what it threw is thrown here.
void run_tasks(int num_threads, size_t count, const std::function<void(size_t)>& task);

}  // namespace titan::checkpoint::detail
