#pragma once

// OffloadActivations: keeps saved tensors in host memory until the backward.

#include <cstdint>
#include <memory>

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

class OffloadFrame;

/// The state that the layers of a list share.
struct Offloader {
  explicit Offloader(const OffloadSettings& settings);
  /// Call it when a layer's forward has ended: frees the device memory of the layer before it.
  void finished(const std::shared_ptr<OffloadFrame>& frame);

  OffloadSettings settings;
  dist::Stream copies;
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
