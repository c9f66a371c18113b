#pragma once

#include <algorithm>
#include <mutex>
#include <vector>

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

namespace titan::dist {

// [Note: streams that wait for other ranks]
// LibTorch's pool has 32 streams of a priority and gives them out in turn, whether or not they are in use. If two of those below shared one, a
// receive that was queued early could delay a call that its sender waits for, and both ranks would wait forever. So each has a stream of its own,
// of the highest priority: a gather that the next layer waits for runs before other computation.
class OwnStream {
 public:
  explicit OwnStream(c10::DeviceIndex device) : stream_(take(device)) {}
  ~OwnStream() {
    const std::lock_guard lock(spare().mutex);
    spare().streams.push_back(stream_);
  }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;

  const c10::cuda::CUDAStream& get() const { return stream_; }

 private:
  // Never destroyed, because the allocator may still know tensors that they used.
  struct Spare {
    std::mutex mutex;
    std::vector<c10::cuda::CUDAStream> streams;
  };
  static Spare& spare() {
    static auto& all = *new Spare;
    return all;
  }
  static c10::cuda::CUDAStream take(c10::DeviceIndex device) {
    {
      const std::lock_guard lock(spare().mutex);
      auto& streams = spare().streams;
      const auto found = std::ranges::find(streams, device, &c10::cuda::CUDAStream::device_index);
      if (found != streams.end()) {
        const c10::cuda::CUDAStream stream = *found;
        streams.erase(found);
        return stream;
      }
    }
    const c10::cuda::CUDAGuard guard(device);
    int lowest = 0, highest = 0;
    C10_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
    cudaStream_t stream = nullptr;
    C10_CUDA_CHECK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, highest));
    return c10::cuda::getStreamFromExternal(stream, device);
  }

  c10::cuda::CUDAStream stream_;
};

}  // namespace titan::dist
