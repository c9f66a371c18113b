#pragma once

// OffloadActivations: saved tensors wait for the backward in the host's memory.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>

#include "dist/stream.h"
#include "parallel/activation_checkpoint/saved_tensor_hooks.h"
#include "titan/nn/hooks.h"

namespace titan::activations {

/// [Note: offloading]
/// Storages move: several nodes save one tensor, or views of one, and it travels once. The copy to
/// the host runs on a stream of its own, after the kernel that made the tensor; the device memory goes one
/// layer later, when the computation's stream has waited for the copy, so that a slow link holds the
/// computation back instead of filling the device. In the backward, the first tensor that a layer asks for
/// starts the copies of the layer before it: they run while this one computes. Device memory is taken and
/// given back on the computation's stream alone.
class OffloadedStorage {
 public:
  OffloadedStorage(const at::Tensor& tensor, const dist::Stream& copies, bool page_locked);
  OffloadedStorage(const OffloadedStorage&) = delete;
  /// A copy that nobody waited for may be under way: the device memory isn't handed out again before its end.
  ~OffloadedStorage();
  /// The copy to the host is over for later work of the computation's stream: the device memory goes.
  void release_device();
  /// False when the tensor is on the device, or on its way.
  bool start_fetch(const dist::Stream& copies);
  /// On the device, as the view that was saved. Fetches first if nobody did.
  at::Tensor view_like(at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset, at::ScalarType dtype,
                       const dist::Stream& copies);
  int64_t bytes() const { return host_.numel(); }

 private:
  at::Tensor device_, host_;  // of bytes
  at::Device where_;
  dist::Event copied_, fetched_;
};

struct OffloadSettings {
  at::Device device = at::kCPU;  ///< where activations are; a CPU's are copied within its memory: for tests
  bool page_locked = true;
  int64_t min_bytes = 1 << 20;
};

/// Counts since construction.
struct OffloadStats {
  int64_t copies = 0;
  int64_t copied_bytes = 0;
  int64_t early_fetches = 0;  ///< started by the layer after it
  int64_t late_fetches = 0;   ///< by the layer itself
};

class OffloadFrame;

/// The state that the layers of a list share.
class Offloader {
 public:
  explicit Offloader(const OffloadSettings& settings);

  const OffloadSettings& settings() const { return settings_; }
  const dist::Stream& copies() const { return copies_; }
  /// A layer's forward is over: the device memory of the one before it goes.
  void finished(std::shared_ptr<OffloadFrame> frame);
  std::weak_ptr<OffloadFrame> newest() const { return newest_; }
  OffloadStats stats;

 private:
  OffloadSettings settings_;
  dist::Stream copies_;
  std::weak_ptr<OffloadFrame> newest_;
};

/// One forward of one layer.
class OffloadFrame final : public SavedTensorHooks, public std::enable_shared_from_this<OffloadFrame> {
 public:
  /// `module`: its name. `before`: the layer whose backward comes next. `stays`: all of this one's tensors
  /// stay on the device.
  OffloadFrame(std::shared_ptr<Offloader> offloader, std::string module,
               std::shared_ptr<const ParameterStorages> parameters, std::weak_ptr<OffloadFrame> before,
               bool stays);
  std::unique_ptr<SavedVariableHooks> make() override;

  /// Null for what stays on the device.
  std::shared_ptr<OffloadedStorage> storage_of(const at::Tensor& tensor);
  /// The forward is over.
  void end();
  void release_device();
  /// A node asks for its tensor: this layer's backward runs.
  void begin_backward();
  Offloader& offloader() { return *offloader_; }
  const std::string& module() const { return module_; }

 private:
  int64_t start_fetches();

  std::shared_ptr<Offloader> offloader_;
  std::string module_;
  std::shared_ptr<const ParameterStorages> parameters_;
  std::weak_ptr<OffloadFrame> before_;
  bool stays_;
  // While the forward runs; all are on the device until then, so that no other takes an address.
  std::unordered_map<const c10::StorageImpl*, std::shared_ptr<OffloadedStorage>> known_;
  std::vector<std::weak_ptr<OffloadedStorage>> storages_;  // owned by the graph
  bool fetching_ = false;
  bool in_backward_ = false;
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
