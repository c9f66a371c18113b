#include "parallel/activation_checkpoint/recompute.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <mutex>
#include <optional>
#include <string>

#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include "dist/device_backend.h"
#include "dist/trace_range.h"
#include "nn/trace_labels.h"
#include "parallel/activation_checkpoint/saved_tensor_hooks.h"
#include "titan/core/error.h"
#include "titan/nn/layers.h"

namespace titan::activations {

using nn::TensorList;

namespace {

bool contains_any(const std::string& name, const std::vector<std::string>& parts) {
  return std::any_of(parts.begin(), parts.end(),
                     [&](const std::string& part) { return name.find(part) != std::string::npos; });
}

const at::Tensor* weight_of(torch::nn::Module& module) {
  return dynamic_cast<nn::ProductsUser*>(&module) ? module.named_parameters(/*recurse=*/false).find("weight")
                                                  : nullptr;
}

}  // namespace

ProductChoice::ProductChoice(const nn::AnyRef& layer, const SelectiveOp& policy) {
  const std::string& prefix = layer.host().fqn();
  for (const auto& named : layer.module().named_modules(prefix, /*include_self=*/true)) {
    const bool recomputed = contains_any(named.key(), policy.recompute_products);
    const at::Tensor* weight = weight_of(*named.value());
    TITAN_CHECK(weight || !recomputed, "checkpoint_activations: '", named.key(),
                "' is listed in recompute_products, but it isn't a linear module; name the module that "
                "multiplies, as in \"attention.wq\"");
    if (weight) products_.push_back({weight->unsafeGetTensorImpl(), recomputed});
  }
}

bool ProductChoice::keeps(const at::Tensor& weight) {
  for (Product& product : products_) {
    if (product.weight != weight.unsafeGetTensorImpl()) continue;
    if (product.recomputed) return false;
    if (product.number < 0) product.number = num_numbered_++;
    return product.number % 2 == 0;
  }
  return false;
}

at::Device compute_device(const TensorList& inputs) {
  for (const at::Tensor& input : inputs)
    if (!input.is_cpu()) return input.device();
  return at::kCPU;
}

namespace {

/// The results that one forward of a layer kept.
class KeptOutputs final : public ops::SavedOutputs {
 public:
  /// `module`: the layer's name. `num_saved`: the number of tensors that autograd has saved in this forward
  /// so far. Both outlive this.
  KeptOutputs(std::shared_ptr<ProductChoice> products, const std::string& module, const size_t& num_saved)
      : products_(std::move(products)), module_(module), num_saved_(num_saved) {}

  Action next(ops::KeptKind kind, const at::Tensor& weight) override {
    if (kind == ops::KeptKind::Product && !products_->keeps(weight)) return Action::Compute;
    asking_ = {kind, weight.unsafeGetTensorImpl()};
    if (!handing_back_) return Action::Keep;
    if (next_ == kept_.size()) return Action::Compute;
    TITAN_CHECK(kept_[next_].source == asking_, "recomputing '", module_,
                "' ran its products and attentions in a different order than the forward: a checkpointed "
                "module has to take the same path twice");
    return Action::HandBack;
  }
  void keep(const at::Tensor& output) override {
    kept_.push_back({asking_, without_graph(output), output._version(), num_saved_});
  }
  at::Tensor hand_back() override {
    TITAN_INTERNAL_ASSERT(next_ < kept_.size(), "kept output ", next_, " of ", kept_.size());
    const Kept& kept = kept_[next_++];
    TITAN_CHECK(kept.output._version() == kept.version,
                "a result that selective checkpointing keeps for the backward of '", module_, "', of shape ",
                kept.output.sizes(),
                ", was modified in place after the operation returned it: use an out-of-place operation");
    return without_graph(kept.output);
  }

  /// Call it after the forward. The recompute stops at the last saved tensor, so outputs kept after that one
  /// would never be used.
  void drop_unreachable() {
    while (!kept_.empty() && kept_.back().num_saved == num_saved_) kept_.pop_back();
  }
  /// Called around a recompute. A module that runs a backward in its forward causes a recompute in the middle
  /// of that forward; after it, the forward's results are kept again.
  void start_handing_back() {
    handing_back_ = true;
    next_ = 0;
  }
  void stop_handing_back() { handing_back_ = false; }

 private:
  /// The operation that gave a result.
  struct Source {
    ops::KeptKind kind;
    const c10::TensorImpl* weight;
    friend bool operator==(const Source&, const Source&) = default;
  };
  struct Kept {
    Source source;
    at::Tensor output;
    int64_t version;
    size_t num_saved;  // before it was computed
  };
  std::shared_ptr<ProductChoice> products_;
  const std::string& module_;
  const size_t& num_saved_;
  std::vector<Kept> kept_;
  Source asking_{};
  size_t next_ = 0;
  bool handing_back_ = false;
};

// A generator's state is a tensor on the CPU for any device of the generator.
at::Tensor state_of(at::Generator& generator) {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == b.nbytes() && std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

/// The state of LibTorch's default generators of the CPU and of `device`.
class RngState {
 public:
  explicit RngState(at::Device device) {
    const auto add = [this](at::Device of) {
      at::Generator generator = at::globalContext().defaultGenerator(of);
      at::Tensor state = state_of(generator);
      entries_.push_back({std::move(generator), std::move(state)});
    };
    add(at::kCPU);
    if (!device.is_cpu() && !device.is_meta()) add(device);
  }
  /// False if numbers have been drawn from one of them since.
  bool is_current() const {
    return std::all_of(entries_.begin(), entries_.end(), [](const Entry& entry) {
      at::Generator generator = entry.generator;
      return same_bytes(entry.state, state_of(generator));
    });
  }
  void restore() const {
    for (const Entry& entry : entries_) {
      at::Generator generator = entry.generator;
      const std::lock_guard<std::mutex> lock(generator.mutex());
      generator.set_state(entry.state);
    }
  }

 private:
  struct Entry {
    at::Generator generator;
    at::Tensor state;
  };
  std::vector<Entry> entries_;
};

/// The inputs of a checkpointed module, for the calls that repeat it. They are saved through autograd, so an
/// enclosing checkpoint may recompute them.
class ModuleInputs {
 public:
  /// `module`: the module's name, for errors; outlives this.
  ModuleInputs(const TensorList& inputs, const std::string& module) : module_(module) {
    inputs_.reserve(inputs.size());
    for (const at::Tensor& input : inputs)
      inputs_.push_back({torch::autograd::SavedVariable(input, /*is_output=*/false), input._version()});
  }
  /// Call it after the forward, with the constructor's inputs. Throws Error if the forward has written to one
  /// of them, and releases them: a written input may own the graph that owns this.
  void check_unwritten(const TensorList& inputs) {
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (inputs[i]._version() == inputs_[i].version) continue;
      inputs_.clear();
      refuse_written(i);
    }
  }
  /// Leaves with the same values. Throws Error if one was written to since.
  nn::TensorList detached() const {
    TensorList inputs;
    inputs.reserve(inputs_.size());
    for (size_t i = 0; i < inputs_.size(); ++i) {
      const auto here = inputs_[i].saved.get_raw_data();  // empty if an enclosing checkpoint recomputes it
      if (here && here->_version() != inputs_[i].version) refuse_written(i);
      const at::Tensor input = inputs_[i].saved.unpack();
      inputs.push_back(input.detach());
      inputs.back().set_requires_grad(input.requires_grad());
    }
    return inputs;
  }

 private:
  struct Input {
    torch::autograd::SavedVariable saved;
    int64_t version;
  };
  [[noreturn]] void refuse_written(size_t number) const {
    throw Error(str(
        "input ", number, " of '", module_,
        "' was modified in place after the call began, but the checkpointed module is called with it again "
        "in the backward: use an out-of-place operation"));
  }

  std::vector<Input> inputs_;
  const std::string& module_;
};

// Takes the place of a saved tensor in an autograd node; the owner keeps the tensor under a number. A parameter stays in the node.
template <class Owner>
class NumberedHooks final : public SavedVariableHooks {
 public:
  explicit NumberedHooks(std::shared_ptr<Owner> owner) : owner_(std::move(owner)) {}
  ~NumberedHooks() override {
    if (number_ >= 0) owner_->drop(static_cast<size_t>(number_));
  }
  void call_pack_hook(const at::Tensor& tensor) override {
    if (owner_->is_parameter(tensor)) {
      parameter_ = without_graph(tensor);
      version_ = tensor._version();
    } else {
      number_ = static_cast<int64_t>(owner_->add(tensor));
    }
  }
  at::Tensor call_unpack_hook() override {
    if (!parameter_.defined()) return owner_->get(static_cast<size_t>(number_));
    TITAN_CHECK(parameter_._version() == version_, "a parameter of '", owner_->module(), "' of shape ",
                parameter_.sizes(),
                " was modified in place between its module's forward and backward: a checkpointed module has "
                "to compute the same twice");
    return parameter_;
  }

 private:
  std::shared_ptr<Owner> owner_;
  int64_t number_ = -1;
  at::Tensor parameter_;
  int64_t version_ = 0;
};

/// [Note: recomputation]
/// Each tensor that the forward saves, parameters aside, becomes a slot: its number in the order of saving, with its
/// shape and dtype. Nodes of the graph own their slots through the hooks that LibTorch keeps instead of the tensor; the
/// hooks own the frame, and the frame owns the module's inputs. The first node that unpacks a slot makes the
/// frame run the module again: the i-th tensor saved by that run fills slot i. A slot returns its tensor
/// once; unpacking it again, or another backward, recomputes. Slots of destroyed nodes stay empty. When the
/// last slot of a living node is filled, an exception (EarlyStop) ends the run where the tensor would be
/// saved. It only passes through C++ frames with destructors.
///
/// With hooks, LibTorch doesn't check whether a saved tensor was written to, so the frame does: it checks the
/// inputs when the forward ends and before it is repeated, and a slot when it is unpacked.
class RecomputeFrame final : public SavedTensorHooks, public std::enable_shared_from_this<RecomputeFrame> {
 public:
  /// `host` is kept alive by `run`.
  RecomputeFrame(nn::HookHost& host, const TensorList& inputs, nn::CheckpointHook::Run run,
                 const ActivationCheckpointOptions& options, const RecomputeParts& parts)
      : host_(host),
        run_(std::move(run)),
        options_(options),
        observer_(parts.observer),
        parameters_(parts.parameters),
        device_(compute_device(inputs)),
        inputs_(inputs, host.fqn()) {
    if (parts.products) kept_ = std::make_unique<KeptOutputs>(parts.products, host.fqn(), num_slots_);
    if (options_.preserve_rng_state) {
      rng_state_.emplace(device_);
      num_recorded_draws_ = num_recorded_draws();
    }
  }
  nn::TensorList forward(const TensorList& inputs) {
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
      run_ = nullptr;  // it holds the results, and their graph owns this
      throw;
    }
    check_not_recorded();
    if (rng_state_ && rng_state_->is_current()) rng_state_.reset();
    if (kept_ && options_.early_stop) kept_->drop_unreachable();
    return outputs;
  }
  std::unique_ptr<SavedVariableHooks> make() override {
    return std::make_unique<NumberedHooks<RecomputeFrame>>(shared_from_this());
  }
  bool drop_tensors() const override { return true; }
  bool is_parameter(const at::Tensor& tensor) const { return parameters_->contains(tensor); }
  const std::string& module() const { return host_.fqn(); }

  // Called by NumberedHooks for each tensor that the forward saves.
  size_t add(const at::Tensor& tensor) {
    if (observer_) observer_->saved(tensor);
    const std::lock_guard lock(mutex_);
    slots_.push_back({at::DimVector(tensor.sizes()), tensor.scalar_type(), {}});
    return num_slots_++;
  }
  at::Tensor get(size_t slot) {
    const std::lock_guard lock(mutex_);
    TITAN_CHECK(!recomputing_, "while '", host_.fqn(),
                "' was recomputed, a backward reached its forward's graph: a checkpointed module can't "
                "differentiate through tensors that it kept from an earlier forward");
    const int backward = torch::autograd::get_current_graph_task_id();
    if (backward_ != backward)
      for (Slot& each : slots_) each.value.reset();  // an earlier backward filled them but didn't use them
    backward_ = backward;
    if (!slots_[slot].value.defined()) recompute();
    at::Tensor value = std::move(slots_[slot].value);
    TITAN_CHECK(value._version() == slots_[slot].version, "tensor ", slot, " of those that '", host_.fqn(),
                "' saves for its backward, ", value.scalar_type(), " ", value.sizes(),
                ", was modified in place after it was saved: use an out-of-place operation");
    return value;
  }
  void drop(size_t slot) {
    const std::lock_guard lock(mutex_);
    slots_[slot].alive = false;
    slots_[slot].value.reset();
  }

 private:
  int64_t num_recorded_draws() const {
    const dist::DeviceBackend* const devices = device_.is_cuda() ? dist::device_backend() : nullptr;
    return devices ? devices->num_recorded_draws() : 0;
  }
  // A recording gives each draw a place of its own in the random numbers, so a recompute would draw others than its forward.
  void check_not_recorded() {
    if (!rng_state_ || num_recorded_draws() == num_recorded_draws_) return;
    run_ = nullptr;  // as above
    throw ConfigError(str(
        "'", host_.fqn(),
        "' draws random numbers and is recomputed, which a recorded step can't repeat: "
        "set compile.enable = false or activation_checkpoint.mode = \"none\"; or, if a recompute may draw "
        "other numbers than its forward, activation_checkpoint.preserve_rng_state = false"));
  }

  // The tensors that one recompute saves. All are kept until the run ends, because the module's forward may
  // itself run backward(). They are dropped when it ends, because a tensor that the module keeps would
  // otherwise keep the run's graph, and so these tensors, alive.
  class Refill final : public SavedTensorHooks, public std::enable_shared_from_this<Refill> {
   public:
    explicit Refill(RecomputeFrame& frame)
        : frame_(frame), module_(frame.host_.fqn()), parameters_(frame.parameters_) {}
    std::unique_ptr<SavedVariableHooks> make() override {
      return std::make_unique<NumberedHooks<Refill>>(shared_from_this());
    }
    bool is_parameter(const at::Tensor& tensor) const { return parameters_->contains(tensor); }
    const std::string& module() const { return module_; }
    size_t add(const at::Tensor& tensor) {
      tensors_.push_back(frame_.refill(tensor));
      return tensors_.size() - 1;
    }
    const at::Tensor& get(size_t number) const {
      TITAN_CHECK(
          number < tensors_.size(), "backward() reached the graph of a finished recompute of '", module_,
          "', whose tensors are freed: detach() tensors that a checkpointed module keeps from its forward, "
          "other than its results");
      return tensors_[number];
    }
    void drop(size_t number) {
      if (number < tensors_.size()) tensors_[number].reset();
    }
    void end() { tensors_.clear(); }

   private:
    RecomputeFrame& frame_;  // used only until end()
    std::string module_;
    std::shared_ptr<const ParameterStorages> parameters_;
    TensorList tensors_;
  };

  /// A std::exception: LibTorch's engine carries only those out of a backward that the module itself runs.
  struct EarlyStop final : std::exception {
    explicit EarlyStop(const RecomputeFrame* frame) : frame(frame) {}
    const char* what() const noexcept override {
      return "the recompute of a checkpointed module has all that the backward needs and stops";
    }
    const RecomputeFrame* frame;
  };
  struct Slot {
    at::DimVector sizes;
    at::ScalarType dtype;
    at::Tensor value;  // recomputed, not yet unpacked
    bool alive = true;
    int64_t version = 0;  // the value's version counter when it was saved
  };

  void recompute() {
    const dist::TraceRange traced([&] { return "recompute " + host_.fqn(); });
    const nn::TraceLabelScope labels;  // restores the labels when an early stop throws through the modules
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
  // A run that stopped early has saved all that is needed; how much more it would save is unknown. During the
  // forward, which may contain a backward, later slots don't exist yet.
  void check_complete() const {
    const bool whole = !options_.early_stop && options_.check_recompute && forward_ended_;
    const bool complete =
        whole ? num_refilled_ == slots_.size() : static_cast<int64_t>(num_refilled_) >= num_needed_;
    TITAN_CHECK(complete, "recomputing '", host_.fqn(), "' saved ", num_refilled_,
                " tensors for the backward where the forward saved ", slots_.size(),
                ": a checkpointed module has to take the same path twice");
  }
  void run_again() {
    // A node may unpack with autograd's keys excluded, and a GPU's nodes run on their own thread.
    const c10::impl::ForceDispatchKeyGuard as_in_forward(forward_keys_);
    const at::AutoGradMode recording(true);
    const TensorList inputs = inputs_.detached();
    std::optional<RngState> outer_rng;  // restored after the recompute
    if (rng_state_) {
      outer_rng.emplace(device_);
      rng_state_->restore();
    }
    const auto put_generators_back = c10::make_scope_exit([&] {
      if (outer_rng) outer_rng->restore();
    });
    const auto refill = std::make_shared<Refill>(*this);
    recomputing_ = true;
    num_refilled_ = 0;
    if (kept_) kept_->start_handing_back();
    const auto end_refill = c10::make_scope_exit([&] {
      if (kept_) kept_->stop_handing_back();
      refill->end();
      recomputing_ = false;
    });
    const HooksScope saving(refill.get());
    const ops::ScopedSavedOutputs handing_back(kept_.get());
    run_(inputs);
  }
  at::Tensor refill(const at::Tensor& tensor) {
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
  void check_slot(size_t slot, const at::Tensor& tensor) const {
    const Slot& expected = slots_[slot];
    TITAN_CHECK(tensor.sizes() == at::IntArrayRef(expected.sizes) && tensor.scalar_type() == expected.dtype,
                "recomputing '", host_.fqn(), "' saved a ", tensor.scalar_type(), " tensor ", tensor.sizes(),
                " as number ", slot, " where the forward saved ", expected.dtype, " ",
                at::IntArrayRef(expected.sizes), ": a checkpointed module has to compute the same twice");
  }
  void find_last_needed() {
    num_needed_ = static_cast<int64_t>(slots_.size());
    while (num_needed_ > 0 && !slots_[static_cast<size_t>(num_needed_ - 1)].alive) --num_needed_;
  }

  nn::HookHost& host_;
  nn::CheckpointHook::Run run_;
  ActivationCheckpointOptions options_;
  std::shared_ptr<FrameObserver> observer_;
  std::shared_ptr<const ParameterStorages> parameters_;
  at::Device device_;
  ModuleInputs inputs_;
  c10::impl::LocalDispatchKeySet forward_keys_ = c10::impl::tls_local_dispatch_key_set();
  std::optional<RngState> rng_state_;
  int64_t num_recorded_draws_ = 0;  // before the forward
  std::unique_ptr<KeptOutputs> kept_;

  // Guards the slots: nodes of two devices run on two threads. Recursive: a module that kept a tensor of its
  // forward may release it in the recompute, and that destroys nodes that own slots.
  std::recursive_mutex mutex_;
  bool recomputing_ = false, forward_ended_ = false;
  std::vector<Slot> slots_;
  size_t num_slots_ = 0;
  int64_t num_needed_ = 0;  // one more than the number of the last slot whose node is alive
  size_t num_refilled_ = 0;
  int backward_ = -1;  // the graph task of the backward that filled the slots
};

}  // namespace

TensorList forward_to_recompute(nn::HookHost& host, const TensorList& inputs, nn::CheckpointHook::Run run,
                                const ActivationCheckpointOptions& options, const RecomputeParts& parts) {
  return std::make_shared<RecomputeFrame>(host, inputs, std::move(run), options, parts)->forward(inputs);
}

TensorList RecomputeHook::call(nn::HookHost& host, const TensorList& inputs, Run run) {
  if (!at::GradMode::is_enabled()) return run(inputs);
  // A forward may write buffers, and a recomputation writes them again.
  if (!parameters_)
    parameters_ =
        std::make_shared<const ParameterStorages>(host.as_module(), ParameterStorages::Buffers::Without);
  return forward_to_recompute(host, inputs, std::move(run), options_, {parameters_, products_, nullptr});
}

}  // namespace titan::activations
