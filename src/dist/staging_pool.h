#pragma once

// Buffers of a group for calls that it composes itself; made once and reused.

#include <cstdint>
#include <mutex>
#include <vector>

#include <ATen/core/Tensor.h>

namespace titan::dist {

/// Thread-safe. A buffer given back is handed out again for the same number of elements and dtype.
class StagingPool {
 public:
  at::Tensor acquire(int64_t numel, at::ScalarType dtype);
  void release(at::Tensor buffer);

 private:
  std::mutex mutex_;
  std::vector<at::Tensor> free_;
};

}  // namespace titan::dist
