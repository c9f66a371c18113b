#pragma once

// [Note: copies of batches]
// Batches come from page-locked memory. When that is freed, on any thread, LibTorch records an event on each stream
// that used it. A stream whose work is being recorded as a graph doesn't allow that, so copies have a stream of their own.

#include <ATen/core/Tensor.h>

#include "dist/stream.h"

namespace titan::train {

class BatchCopies {
 public:
  explicit BatchCopies(at::Device device) : device_(device), stream_(dist::Stream::create(device)) {}

  /// A tensor that is there already is returned as it is.
  at::Tensor on_device(const at::Tensor& host) const {
    if (host.device() == device_) return host;
    at::Tensor arrived;
    {
      const dist::StreamGuard on_copies(stream_);
      arrived = host.to(device_, host.scalar_type(), /*non_blocking=*/true);
    }
    const dist::Stream current = dist::Stream::current(device_);
    current.wait(stream_);
    current.keep_alive(arrived);
    return arrived;
  }

 private:
  at::Device device_;
  dist::Stream stream_;
};

}  // namespace titan::train
