#include "parallel/activation_checkpoint/recompute_frame.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include "titan/core/error.h"

namespace titan::activations {

using nn::TensorList;

// Stands in a node of the forward's graph for the tensor that it saved.
class RecomputeFrame::SlotHooks final : public SavedVariableHooks {
 public:
  explicit SlotHooks(std::shared_ptr<RecomputeFrame> frame) : frame_(std::move(frame)) {}
  ~SlotHooks() override {
    if (slot_ >= 0) frame_->abandon(static_cast<size_t>(slot_));
  }
  void call_pack_hook(const at::Tensor& tensor) override {
    slot_ = static_cast<int64_t>(frame_->add_slot(tensor));
  }
  at::Tensor call_unpack_hook() override { return frame_->take(static_cast<size_t>(slot_)); }

 private:
  std::shared_ptr<RecomputeFrame> frame_;
  int64_t slot_ = -1;
};

// The same in the recompute's graph, which is dropped with the run. A module may hold a backward of its own,
// so the tensor is there.
class RecomputeFrame::RefillHooks final : public SavedVariableHooks {
 public:
  explicit RefillHooks(RecomputeFrame& frame) : frame_(frame) {}
  void call_pack_hook(const at::Tensor& tensor) override { tensor_ = frame_.refill(tensor); }
  at::Tensor call_unpack_hook() override { return tensor_; }

 private:
  RecomputeFrame& frame_;
  at::Tensor tensor_;
};

class RecomputeFrame::Refill final : public SavedTensorHooks {
 public:
  explicit Refill(RecomputeFrame& frame) : frame_(frame) {}
  std::unique_ptr<SavedVariableHooks> make() override { return std::make_unique<RefillHooks>(frame_); }

 private:
  RecomputeFrame& frame_;
};

RecomputeFrame::RecomputeFrame(nn::HookHost& host, const TensorList& inputs, nn::CheckpointHook::Run run,
                               const CheckpointOptions& options, const Parts& parts)
    : host_(host),
      run_(std::move(run)),
      options_(options),
      observer_(parts.observer),
      device_(inputs.empty() ? at::Device(at::kCPU) : inputs[0].device()) {
  // As any tensor that autograd saves: a checkpoint around this one may compute them again in its turn.
  inputs_.reserve(inputs.size());
  for (const at::Tensor& input : inputs) inputs_.emplace_back(input, /*is_output=*/false);
  if (parts.products) kept_ = std::make_unique<KeptOutputs>(parts.products, num_slots_);
  if (options_.preserve_rng_state) rng_state_ = std::make_unique<RngState>(device_);
}

TensorList RecomputeFrame::forward(const TensorList& inputs) {
  TensorList outputs;
  {
    const HooksScope saving(this);
    const ops::ScopedSavedOutputs keeping(kept_ || !observer_ ? kept_.get() : observer_->outputs());
    outputs = run_(inputs);
  }
  if (rng_state_ && rng_state_->is_current()) rng_state_.reset();
  if (kept_ && options_.early_stop) kept_->drop_unreachable();
  return outputs;
}

std::unique_ptr<SavedVariableHooks> RecomputeFrame::make() {
  return std::make_unique<SlotHooks>(shared_from_this());
}

size_t RecomputeFrame::add_slot(const at::Tensor& tensor) {
  if (observer_) observer_->saved(tensor);
  const std::lock_guard lock(mutex_);
  slots_.push_back({at::DimVector(tensor.sizes()), tensor.scalar_type(), {}});
  return num_slots_++;
}

void RecomputeFrame::abandon(size_t slot) {
  const std::lock_guard lock(mutex_);
  slots_[slot].alive = false;
  slots_[slot].value.reset();
}

at::Tensor RecomputeFrame::take(size_t slot) {
  const std::lock_guard lock(mutex_);
  const int backward = torch::autograd::get_current_graph_task_id();
  if (backward_ != backward)
    for (Slot& each : slots_) each.value.reset();  // of a backward that didn't ask for them
  backward_ = backward;
  if (!slots_[slot].value.defined()) recompute();
  return std::move(slots_[slot].value);
}

void RecomputeFrame::recompute() {
  if (observer_) observer_->recomputing();
  find_last_needed();
  num_refilled_ = 0;
  try {
    run_again();
  } catch (const EarlyStop& stop) {
    if (stop.frame != this) throw;
  } catch (...) {
    for (Slot& slot : slots_) slot.value.reset();
    throw;
  }
  if (observer_) observer_->recomputed();
  TITAN_CHECK(static_cast<int64_t>(num_refilled_) >= num_needed_, "recomputing '", host_.fqn(), "' saved ",
              num_refilled_, " tensors for the backward where the forward saved ", slots_.size(),
              ": a checkpointed module has to take the same path twice");
}

void RecomputeFrame::run_again() {
  // A node may ask from below autograd, and a GPU's runs on a thread of its own.
  const c10::impl::ForceDispatchKeyGuard as_in_forward(forward_keys_);
  const at::AutoGradMode recording(true);
  const TensorList inputs = detached_inputs();
  const ScopedRngState drawing(rng_state_.get(), device_);
  Refill refill(*this);
  const HooksScope saving(&refill);
  if (kept_) kept_->start_handing_back();
  const ops::ScopedSavedOutputs handing_back(kept_.get());
  run_(inputs);
}

void RecomputeFrame::find_last_needed() {
  num_needed_ = static_cast<int64_t>(slots_.size());
  while (num_needed_ > 0 && !slots_[static_cast<size_t>(num_needed_ - 1)].alive) --num_needed_;
}

at::Tensor RecomputeFrame::refill(const at::Tensor& tensor) {
  at::Tensor bare = without_graph(tensor);
  const size_t i = num_refilled_++;
  if (i >= slots_.size()) return bare;
  if (options_.check_recompute) check_slot(i, tensor);
  if (slots_[i].alive) slots_[i].value = bare;
  if (options_.early_stop && static_cast<int64_t>(i) + 1 == num_needed_) throw EarlyStop{this};
  return bare;
}

void RecomputeFrame::check_slot(size_t slot, const at::Tensor& tensor) const {
  const Slot& expected = slots_[slot];
  TITAN_CHECK(tensor.sizes() == at::IntArrayRef(expected.sizes) && tensor.scalar_type() == expected.dtype,
              "recomputing '", host_.fqn(), "' saved a ", tensor.scalar_type(), " tensor ", tensor.sizes(),
              " as number ", slot, " where the forward saved ", expected.dtype, " ",
              at::IntArrayRef(expected.sizes), ": a checkpointed module has to compute the same twice");
}

TensorList RecomputeFrame::detached_inputs() const {
  TensorList inputs;
  inputs.reserve(inputs_.size());
  for (const auto& saved : inputs_) {
    const at::Tensor input = saved.unpack();
    inputs.push_back(input.detach());
    inputs.back().set_requires_grad(input.requires_grad());
  }
  return inputs;
}

}  // namespace titan::activations
