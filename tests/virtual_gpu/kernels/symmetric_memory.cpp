// A host version of the kernel with which LibTorch's symmetric memory lets ranks wait for each other.
// https://github.com/pytorch/pytorch/blob/v2.11.0/torch/csrc/distributed/c10d/symm_mem/CUDASymmetricMemoryUtils.cu

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "runtime/virtual_gpu.h"

namespace virtual_gpu {
namespace {

bool exchange(uint32_t* signal, uint32_t from, uint32_t to) {
  return std::atomic_ref(*signal).compare_exchange_strong(from, to);
}

template <class T>
T argument(const Launch& launch, size_t i) {
  return *static_cast<const T*>(launch.arguments[i]);
}

// Sets this rank's signal at every peer, then takes every peer's signal. `pads` is in the device's memory.
void barrier(const Launch& launch) {
  auto* const pads = argument<uint32_t**>(launch, 0);
  const auto channel = argument<int>(launch, 1);
  const auto rank = argument<int>(launch, 2);
  const auto size = argument<int>(launch, 3);
  const auto begin = [=]() -> Attempt {
    struct Progress {
      std::vector<bool> is_set, is_taken;
    };
    auto progress = std::make_shared<Progress>(Progress{std::vector<bool>(size), std::vector<bool>(size)});
    return [=] {
      bool is_done = true;
      for (int peer = 0; peer < size; ++peer) {
        if (peer == rank) continue;
        if (!progress->is_set[peer])
          progress->is_set[peer] = exchange(pads[peer] + size * channel + rank, 0, 1);
        if (!progress->is_taken[peer])
          progress->is_taken[peer] = exchange(pads[rank] + size * channel + peer, 1, 0);
        is_done = is_done && progress->is_set[peer] && progress->is_taken[peer];
      }
      return is_done;
    };
  };
  submit(launch.stream, {.name = "symmetric_memory::barrier", .ranges = {}, .begin = begin});
}

[[maybe_unused]] const bool registered = [] {
  register_kernel("symmetric_memory::barrier_kernel(", barrier);
  return true;
}();

}  // namespace
}  // namespace virtual_gpu
