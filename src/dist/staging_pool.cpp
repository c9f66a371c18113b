#include "staging_pool.h"

#include <algorithm>

#include <ATen/ops/empty.h>

namespace titan::dist {

namespace {
// More than what overlaps in one group at a time; older sizes make room.
constexpr size_t kMostFree = 4;
}  // namespace

at::Tensor StagingPool::acquire(int64_t numel, at::ScalarType dtype) {
  std::lock_guard lock(mutex_);
  const auto fits = [&](const at::Tensor& t) { return t.numel() == numel && t.scalar_type() == dtype; };
  const auto found = std::find_if(free_.begin(), free_.end(), fits);
  if (found == free_.end()) return at::empty({numel}, dtype);
  at::Tensor buffer = std::move(*found);
  free_.erase(found);
  return buffer;
}

void StagingPool::release(at::Tensor buffer) {
  std::lock_guard lock(mutex_);
  if (free_.size() == kMostFree) free_.erase(free_.begin());
  free_.push_back(std::move(buffer));
}

}  // namespace titan::dist
