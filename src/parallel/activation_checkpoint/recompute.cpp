#include "parallel/activation_checkpoint/recompute.h"

#include <algorithm>
#include <cstring>
#include <mutex>

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include "dist/trace_range.h"
#include "nn/trace_labels.h"
#include "titan/core/error.h"

namespace titan::activations {

namespace {

// A generator's state is a tensor on the CPU, whatever the generator's device.
at::Tensor state_of(at::Generator& generator) {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == b.nbytes() && std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

}  // namespace

RngState::RngState(at::Device device) {
  const auto add = [this](at::Device of) {
    at::Generator generator = at::globalContext().defaultGenerator(of);
    at::Tensor state = state_of(generator);
    entries_.push_back({std::move(generator), std::move(state)});
  };
  add(at::kCPU);
  if (!device.is_cpu() && !device.is_meta()) add(device);
}

bool RngState::is_current() const {
  return std::all_of(entries_.begin(), entries_.end(), [](const Entry& entry) {
    at::Generator generator = entry.generator;
    return same_bytes(entry.state, state_of(generator));
  });
}

void RngState::restore() const {
  for (const Entry& entry : entries_) {
    at::Generator generator = entry.generator;
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(entry.state);
  }
}

ScopedRngState::ScopedRngState(const RngState* state, at::Device device) {
  if (!state) return;
  outer_ = std::make_unique<const RngState>(device);
  state->restore();
}

ScopedRngState::~ScopedRngState() {
  if (outer_) outer_->restore();
}

using nn::TensorList;

ModuleInputs::ModuleInputs(const TensorList& inputs, const std::string& module) : module_(module) {
  inputs_.reserve(inputs.size());
  for (const at::Tensor& input : inputs)
    inputs_.push_back({torch::autograd::SavedVariable(input, /*is_output=*/false), input._version()});
}

void ModuleInputs::check_unwritten(const TensorList& inputs) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i]._version() == inputs_[i].version) continue;
    inputs_.clear();
    refuse_written(i);
  }
}

TensorList ModuleInputs::detached() const {
  TensorList inputs;
  inputs.reserve(inputs_.size());
  for (size_t i = 0; i < inputs_.size(); ++i) {
    const auto here = inputs_[i].saved.get_raw_data();  // empty under another checkpoint, which computes it
    if (here && here->_version() != inputs_[i].version) refuse_written(i);
    const at::Tensor input = inputs_[i].saved.unpack();
    inputs.push_back(input.detach());
    inputs.back().set_requires_grad(input.requires_grad());
  }
  return inputs;
}

void ModuleInputs::refuse_written(size_t number) const {
  throw Error(str("input ", number, " of '", module_,
                  "' was written to after the call began, but a checkpointed module is called with it again: "
                  "use an operation that isn't in place"));
}

at::Device compute_device(const TensorList& inputs) {
  for (const at::Tensor& input : inputs)
    if (!input.is_cpu()) return input.device();
  return at::kCPU;
}

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

// The tensors that one recompute saves. A module may hold a backward of its own, so all of it is there while
// the run lasts; and no longer, as a module may keep a tensor of it, and with that the run's graph.
class RecomputeFrame::Refill final : public SavedTensorHooks,
                                     public std::enable_shared_from_this<RecomputeFrame::Refill> {
 public:
  explicit Refill(RecomputeFrame& frame) : frame_(frame), module_(frame.host_.fqn()) {}
  std::unique_ptr<SavedVariableHooks> make() override;
  size_t add(const at::Tensor& tensor) {
    tensors_.push_back(frame_.refill(tensor));
    return tensors_.size() - 1;
  }
  const at::Tensor& tensor(size_t number) const {
    TITAN_CHECK(
        number < tensors_.size(), "a backward through the recompute of '", module_,
        "', which has ended and kept nothing: detach() tensors that a checkpointed module keeps from its "
        "forward, other than its results");
    return tensors_[number];
  }
  void drop(size_t number) {
    if (number < tensors_.size()) tensors_[number].reset();
  }
  void end() { tensors_.clear(); }

 private:
  RecomputeFrame& frame_;  // until the end
  std::string module_;
  TensorList tensors_;
};

class RecomputeFrame::RefillHooks final : public SavedVariableHooks {
 public:
  explicit RefillHooks(std::shared_ptr<Refill> run) : run_(std::move(run)) {}
  ~RefillHooks() override {
    if (number_ >= 0) run_->drop(static_cast<size_t>(number_));
  }
  void call_pack_hook(const at::Tensor& tensor) override {
    number_ = static_cast<int64_t>(run_->add(tensor));
  }
  at::Tensor call_unpack_hook() override { return run_->tensor(static_cast<size_t>(number_)); }

 private:
  std::shared_ptr<Refill> run_;
  int64_t number_ = -1;
};

std::unique_ptr<SavedVariableHooks> RecomputeFrame::Refill::make() {
  return std::make_unique<RefillHooks>(shared_from_this());
}

// The state of the frame during a recompute, restored also after an exception.
class RecomputeFrame::Recomputing {
 public:
  explicit Recomputing(RecomputeFrame& frame) : frame_(frame), refill_(std::make_shared<Refill>(frame)) {
    frame_.recomputing_ = true;
    frame_.num_refilled_ = 0;
    if (frame_.kept_) frame_.kept_->start_handing_back();
  }
  ~Recomputing() {
    if (frame_.kept_) frame_.kept_->stop_handing_back();
    refill_->end();
    frame_.recomputing_ = false;
  }
  Recomputing(const Recomputing&) = delete;
  Recomputing& operator=(const Recomputing&) = delete;
  SavedTensorHooks* hooks() const { return refill_.get(); }

 private:
  RecomputeFrame& frame_;
  std::shared_ptr<Refill> refill_;
};

RecomputeFrame::RecomputeFrame(nn::HookHost& host, const TensorList& inputs, nn::CheckpointHook::Run run,
                               const ActivationCheckpointOptions& options, const Parts& parts)
    : host_(host),
      run_(std::move(run)),
      options_(options),
      observer_(parts.observer),
      device_(compute_device(inputs)),
      inputs_(inputs, host.fqn()) {
  if (parts.products) kept_ = std::make_unique<KeptOutputs>(parts.products, host.fqn(), num_slots_);
  if (options_.preserve_rng_state) rng_state_ = std::make_unique<RngState>(device_);
}

TensorList RecomputeFrame::forward(const TensorList& inputs) {
  TensorList outputs;
  {
    const HooksScope saving(this);
    const ops::ScopedSavedOutputs keeping(kept_ || !observer_ ? kept_.get() : observer_->outputs());
    outputs = run_(inputs);
  }
  forward_ended_ = true;
  try {
    inputs_.check_unwritten(inputs);
  } catch (...) {
    run_ = nullptr;  // it has the results, and they have the graph that owns this
    throw;
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
  TITAN_CHECK(!recomputing_, "while '", host_.fqn(),
              "' was recomputed, a backward reached its forward's graph: a checkpointed module can't "
              "differentiate through tensors that it kept from an earlier forward");
  const int backward = torch::autograd::get_current_graph_task_id();
  if (backward_ != backward)
    for (Slot& each : slots_) each.value.reset();  // of a backward that didn't ask for them
  backward_ = backward;
  if (!slots_[slot].value.defined()) recompute();
  at::Tensor value = std::move(slots_[slot].value);
  TITAN_CHECK(value._version() == slots_[slot].version, "tensor ", slot, " of those that '", host_.fqn(),
              "' saves for its backward, ", value.scalar_type(), " ", value.sizes(),
              ", was written to after it was saved: use an operation that isn't in place");
  return value;
}

void RecomputeFrame::recompute() {
  const dist::TraceRange traced([&] { return "recompute " + host_.fqn(); });
  const nn::TraceLabelScope labels;  // an early stop comes as an exception through the modules
  if (observer_) observer_->recomputing();
  find_last_needed();
  try {
    run_again();
  } catch (const EarlyStop& stop) {
    if (stop.frame != this) throw;
  } catch (...) {
    for (Slot& slot : slots_) slot.value.reset();
    throw;
  }
  if (observer_) observer_->recomputed();
  check_complete();
}

// A run that stopped early saved what is needed; what else it would save is unknown. During the forward,
// which may contain a backward, later slots don't exist yet.
void RecomputeFrame::check_complete() const {
  const bool whole = !options_.early_stop && options_.check_recompute && forward_ended_;
  const bool complete =
      whole ? num_refilled_ == slots_.size() : static_cast<int64_t>(num_refilled_) >= num_needed_;
  TITAN_CHECK(complete, "recomputing '", host_.fqn(), "' saved ", num_refilled_,
              " tensors for the backward where the forward saved ", slots_.size(),
              ": a checkpointed module has to take the same path twice");
}

void RecomputeFrame::run_again() {
  // A node may ask from below autograd, and a GPU's runs on a thread of its own.
  const c10::impl::ForceDispatchKeyGuard as_in_forward(forward_keys_);
  const at::AutoGradMode recording(true);
  const TensorList inputs = inputs_.detached();
  const ScopedRngState drawing(rng_state_.get(), device_);
  const Recomputing refilling(*this);
  const HooksScope saving(refilling.hooks());
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
  // All needed slots are filled. Does nothing where the module caught the exception that ends the run.
  if (i >= (options_.early_stop ? static_cast<size_t>(num_needed_) : slots_.size())) return bare;
  if (options_.check_recompute) check_slot(i, tensor);
  if (slots_[i].alive) {
    slots_[i].value = bare;
    slots_[i].version = bare._version();
  }
  if (options_.early_stop && static_cast<int64_t>(i) + 1 == num_needed_) throw EarlyStop(this);
  return bare;
}

void RecomputeFrame::check_slot(size_t slot, const at::Tensor& tensor) const {
  const Slot& expected = slots_[slot];
  TITAN_CHECK(tensor.sizes() == at::IntArrayRef(expected.sizes) && tensor.scalar_type() == expected.dtype,
              "recomputing '", host_.fqn(), "' saved a ", tensor.scalar_type(), " tensor ", tensor.sizes(),
              " as number ", slot, " where the forward saved ", expected.dtype, " ",
              at::IntArrayRef(expected.sizes), ": a checkpointed module has to compute the same twice");
}

nn::TensorList RecomputeHook::call(nn::HookHost& host, const nn::TensorList& inputs, Run run) {
  if (!at::GradMode::is_enabled()) return run(inputs);
  const auto frame = std::make_shared<RecomputeFrame>(host, inputs, std::move(run), options_,
                                                      RecomputeFrame::Parts{products_, nullptr});
  return frame->forward(inputs);
}

}  // namespace titan::activations
