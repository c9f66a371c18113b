#include "parallel/activation_checkpoint/offload.h"

#include <exception>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/variable.h>

#include "dist/stream.h"
#include "titan/core/error.h"

namespace titan::activations {

namespace {

at::Tensor all_bytes(const at::Tensor& tensor) {
  const c10::Storage& storage = tensor.storage();
  at::Tensor bytes = at::empty({0}, tensor.options().dtype(at::kByte));
  return bytes.set_(storage, 0, {static_cast<int64_t>(storage.nbytes())}, {1});
}

/// [Note: offloading]
/// Whole storages move: if several nodes save one tensor, or views of one, it is copied once. The copy to the
/// host runs on its own stream, after the kernel that made the tensor. The device memory is freed one layer
/// later, after the computation's stream has waited for the copy, so a slow link delays the computation
/// instead of filling the device. In the backward, the first tensor that a layer asks for starts the copies
/// of the layer before it, which run while this layer computes. Device memory is allocated and freed on the
/// computation's stream only.
class OffloadedStorage {
 public:
  OffloadedStorage(const at::Tensor& tensor, const dist::Stream& copies, std::shared_ptr<HostBuffers> buffers)
      : device_(all_bytes(tensor)), where_(tensor.device()), buffers_(std::move(buffers)) {
    host_ = buffers_->take(device_.numel());
    copies.wait(dist::Stream::current(where_));
    const dist::StreamGuard on_copies(copies);
    host_.copy_(device_, /*non_blocking=*/true);
    copied_.record(copies);
  }
  OffloadedStorage(const OffloadedStorage&) = delete;
  /// Waits for copies still running, so that the device memory isn't reused before they end.
  ~OffloadedStorage() {
    try {
      buffers_->give_back(std::move(host_));
      if (!device_.defined()) return;
      const dist::Stream computing = dist::Stream::current(where_);
      computing.wait(copied_);
      computing.wait(fetched_);
    } catch (const std::exception&) {
      // The device has failed, and the next call to it reports the error.
    }
  }
  /// Makes the computation's stream wait for the copy to the host, then frees the device memory.
  void release_device() {
    if (!device_.defined()) return;
    dist::Stream::current(where_).wait(copied_);
    device_.reset();
  }
  /// Returns false if the tensor is on the device or being copied there.
  bool start_fetch(const dist::Stream& copies) {
    if (device_.defined()) return false;
    device_ = at::empty(host_.sizes(), at::TensorOptions().dtype(at::kByte).device(where_));
    copies.wait(dist::Stream::current(where_));  // its earlier work may still use this memory
    const dist::StreamGuard on_copies(copies);
    device_.copy_(host_, /*non_blocking=*/true);
    fetched_.record(copies);
    return true;
  }
  /// The saved view, on the device. Starts the fetch if it hasn't been started.
  at::Tensor view_like(at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset, at::ScalarType dtype,
                       const dist::Stream& copies) {
    const at::NoGradGuard no_grad;
    start_fetch(copies);
    dist::Stream::current(where_).wait(fetched_);
    at::Tensor view = at::empty({0}, device_.options().dtype(dtype));
    return view.set_(device_.storage(), offset, sizes, strides);
  }
  int64_t bytes() const { return host_.numel(); }

 private:
  at::Tensor device_, host_;  // as bytes
  at::Device where_;
  std::shared_ptr<HostBuffers> buffers_;
  dist::Event copied_, fetched_;
};

}  // namespace

/// One forward of one layer.
class OffloadFrame final : public SavedTensorHooks, public std::enable_shared_from_this<OffloadFrame> {
 public:
  /// `module`: the layer's name. `before`: the layer whose backward comes next. `stays`: keep all of this
  /// layer's tensors on the device.
  OffloadFrame(std::shared_ptr<Offloader> offloader, std::string module,
               std::shared_ptr<const ParameterStorages> parameters, std::weak_ptr<OffloadFrame> before,
               bool stays)
      : offloader_(std::move(offloader)),
        module_(std::move(module)),
        parameters_(std::move(parameters)),
        before_(std::move(before)),
        stays_(stays) {}
  std::unique_ptr<SavedVariableHooks> make() override;

  /// Null for a tensor that stays on the device.
  std::shared_ptr<OffloadedStorage> storage_of(const at::Tensor& tensor) {
    const OffloadSettings& settings = offloader_->settings;
    if (stays_ || tensor.device() != settings.device || !tensor.has_storage() ||
        parameters_->contains(tensor))
      return nullptr;
    const auto bytes = static_cast<int64_t>(tensor.storage().nbytes());
    // For a small part of a large buffer, the whole buffer would be copied.
    if (bytes < settings.min_bytes || bytes > 2 * static_cast<int64_t>(tensor.nbytes())) return nullptr;
    auto& known = known_[tensor.storage().unsafeGetStorageImpl()];
    if (known) return known;
    const at::NoGradGuard no_grad;
    known = std::make_shared<OffloadedStorage>(tensor, offloader_->copies, offloader_->buffers);
    storages_.push_back(known);
    ++offloader_->stats.copies;
    offloader_->stats.copied_bytes += known->bytes();
    return known;
  }
  void end() { known_.clear(); }
  void release_device() {
    if (fetching_) return;
    for (const auto& weak : storages_)
      if (const auto storage = weak.lock()) storage->release_device();
  }
  /// Called when a node asks for its tensor, so this layer's backward is running.
  void begin_backward() {
    if (std::exchange(in_backward_, true)) return;
    offloader_->stats.late_fetches += start_fetches();
    if (const auto before = before_.lock()) offloader_->stats.early_fetches += before->start_fetches();
  }
  Offloader& offloader() { return *offloader_; }
  const std::string& module() const { return module_; }

 private:
  // Newest first: the backward needs it first.
  int64_t start_fetches() {
    fetching_ = true;
    int64_t num_started = 0;
    for (auto weak = storages_.rbegin(); weak != storages_.rend(); ++weak)
      if (const auto storage = weak->lock()) num_started += storage->start_fetch(offloader_->copies);
    return num_started;
  }

  std::shared_ptr<Offloader> offloader_;
  std::string module_;
  std::shared_ptr<const ParameterStorages> parameters_;
  std::weak_ptr<OffloadFrame> before_;
  bool stays_;
  // Used while the forward runs. Until it ends all are on the device, so no address is reused.
  std::unordered_map<const c10::StorageImpl*, std::shared_ptr<OffloadedStorage>> known_;
  std::vector<std::weak_ptr<OffloadedStorage>> storages_;  // owned by the graph
  bool fetching_ = false;
  bool in_backward_ = false;
};

namespace {

// Held by a node of the graph, for a tensor in host memory or one that stayed on the device.
class OffloadHooks final : public SavedVariableHooks {
 public:
  explicit OffloadHooks(std::shared_ptr<OffloadFrame> frame) : frame_(std::move(frame)) {}

  void call_pack_hook(const at::Tensor& tensor) override {
    counter_ = torch::autograd::impl::version_counter(tensor);
    version_ = counter_.current_version();
    storage_ = frame_->storage_of(tensor);
    if (!storage_) {
      stayed_ = without_graph(tensor);
      return;
    }
    sizes_ = at::DimVector(tensor.sizes());
    strides_ = at::DimVector(tensor.strides());
    offset_ = tensor.storage_offset();
    dtype_ = tensor.scalar_type();
  }

  at::Tensor call_unpack_hook() override {
    TITAN_CHECK(counter_.current_version() == version_, "a tensor that '", frame_->module(),
                "' saves for its backward was modified in place afterwards: use an out-of-place operation");
    frame_->begin_backward();
    if (!storage_) return stayed_;
    return storage_->view_like(sizes_, strides_, offset_, dtype_, frame_->offloader().copies);
  }

 private:
  std::shared_ptr<OffloadFrame> frame_;
  std::shared_ptr<OffloadedStorage> storage_;
  at::Tensor stayed_;
  // The tensor's version counter, which outlives the tensor. LibTorch leaves the check to the hooks.
  c10::VariableVersion counter_;
  uint32_t version_ = 0;
  at::DimVector sizes_, strides_;
  int64_t offset_ = 0;
  at::ScalarType dtype_ = at::kByte;
};

}  // namespace

at::Tensor HostBuffers::take(int64_t bytes) {
  constexpr int64_t most_requests = 4096;  // after so many for others, buffers of a size are freed
  {
    const std::lock_guard lock(mutex_);
    Idle& idle = idle_[bytes];
    idle.asked = ++num_requests_;
    std::erase_if(idle_, [&](const auto& size) { return size.second.asked < num_requests_ - most_requests; });
    if (!idle.buffers.empty()) {
      at::Tensor buffer = std::move(idle.buffers.back());
      idle.buffers.pop_back();
      return buffer;
    }
  }
  return at::empty({bytes}, at::TensorOptions().dtype(at::kByte).pinned_memory(page_locked_));
}
size_t HostBuffers::num_idle() const {
  const std::lock_guard lock(mutex_);
  size_t count = 0;
  for (const auto& [bytes, idle] : idle_) count += idle.buffers.size();
  return count;
}
void HostBuffers::give_back(at::Tensor buffer) {
  const std::lock_guard lock(mutex_);
  idle_[buffer.numel()].buffers.push_back(std::move(buffer));
}

Offloader::Offloader(const OffloadSettings& settings)
    : settings(settings),
      copies(dist::Stream::create(settings.device)),
      buffers(std::make_shared<HostBuffers>(settings.page_locked)) {
  dist::name_stream("activation offload", copies);
}

void Offloader::finished(const std::shared_ptr<OffloadFrame>& frame) {
  if (const auto previous = newest.lock()) previous->release_device();
  newest = frame;
}

std::unique_ptr<SavedVariableHooks> OffloadFrame::make() {
  return std::make_unique<OffloadHooks>(shared_from_this());
}

nn::TensorList OffloadHook::call(nn::HookHost& host, const nn::TensorList& inputs, Run run) {
  if (!at::GradMode::is_enabled()) return run(inputs);
  if (!parameters_) parameters_ = std::make_shared<const ParameterStorages>(host.as_module());
  const auto before = is_first_ ? std::weak_ptr<OffloadFrame>() : offloader_->newest;
  const auto frame = std::make_shared<OffloadFrame>(offloader_, host.fqn(), parameters_, before, stays_);
  nn::TensorList outputs;
  {
    const HooksScope saving(frame.get());
    outputs = run(inputs);
  }
  frame->end();
  offloader_->finished(frame);
  return outputs;
}

}  // namespace titan::activations
