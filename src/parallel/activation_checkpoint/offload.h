#pragma once

// OffloadActivations: keeps saved tensors in host memory until the backward.

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include <ATen/core/Tensor.h>

#include "dist/stream.h"
#include "parallel/activation_checkpoint/saved_tensor_hooks.h"
#include "titan/nn/hooks.h"

namespace titan::activations {

struct OffloadSettings {
  at::Device device = at::kCPU;  ///< where activations are; a CPU copies within host memory, for tests
  bool page_locked = true;
  int64_t min_bytes = 1 << 20;
};

/// Counts since construction.
struct OffloadStats {
  int64_t copies = 0;
  int64_t copied_bytes = 0;
  int64_t early_fetches = 0;  ///< started during the backward of the layer after it
  int64_t late_fetches = 0;   ///< started by the layer that needs them
};

/// Host memory for copies. A buffer that was given back is used again at once, because all copies run on one stream; LibTorch's allocator would wait
/// for the copies that the host has queued, and take more memory meanwhile.
class HostBuffers {
 public:
  explicit HostBuffers(bool page_locked) : page_locked_(page_locked) {}
  at::Tensor take(int64_t bytes);
  void give_back(at::Tensor buffer);
  size_t num_idle() const;

 private:
  bool page_locked_;
  mutable std::mutex mutex_;
  struct Idle {
    std::vector<at::Tensor> buffers;
    int64_t asked = 0;  // the number of the last request for this size
  };
  std::map<int64_t, Idle> idle_;  // by bytes
  int64_t num_requests_ = 0;
};

class OffloadFrame;

/// The state that the layers of a list share.
struct Offloader {
  explicit Offloader(const OffloadSettings& settings);
  /// Call it when a layer's forward has ended: frees the device memory of the layer before it.
  void finished(const std::shared_ptr<OffloadFrame>& frame);

  OffloadSettings settings;
  dist::Stream copies;
  std::shared_ptr<HostBuffers> buffers;
  std::weak_ptr<OffloadFrame> newest;
  OffloadStats stats;
};

class OffloadHook final : public nn::CheckpointHook {
 public:
  /// `stays`: one of the last layers, whose tensors are needed at once.
  OffloadHook(std::shared_ptr<Offloader> offloader, bool is_first, bool stays)
      : offloader_(std::move(offloader)), is_first_(is_first), stays_(stays) {}
  nn::TensorList call(nn::HookHost& host, const nn::TensorList& inputs, Run run) override;

 private:
  std::shared_ptr<Offloader> offloader_;
  std::shared_ptr<const ParameterStorages> parameters_;
  bool is_first_, stays_;
};

}  // namespace titan::activations
