#pragma once

// The base of modules that sharding, checkpointing and tracing can wrap, and the initial values of
// parameters. This header doesn't include LibTorch's module headers, so code that only passes modules around
// compiles fast.
//
//   void freeze(const titan::nn::AnyRef& model);          // takes any nn::Ref
//   MyModel model(args, titan::deferred(at::kCPU));       // sizes only, no memory yet

#include <concepts>
#include <string_view>

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/util/SmallVector.h>

#include "titan/ops/linear.h"
#include "titan/tensor/placement.h"

namespace torch::nn {
class Module;
}

namespace titan::nn {

/// Where and how a module creates its parameters. Constructors pass it to their submodules.
struct Construct {
  at::Device device = at::kCPU;
  at::ScalarType dtype = at::kFloat;
  bool deferred = false;  ///< sizes only; materialize() allocates and initializes this rank's part
};

/// A distribution to draw a parameter from.
struct Init {
  enum class Kind { Constant, Normal, TruncatedNormal, Uniform };
  Kind kind = Kind::Constant;
  double mean = 0;  ///< Constant: the value
  double std = 1;
  double low = 0;  ///< Uniform and TruncatedNormal: absolute bounds
  double high = 0;

  static Init constant(double value) { return {Kind::Constant, value, 0, 0, 0}; }
  static Init normal(double mean, double std) { return {Kind::Normal, mean, std, 0, 0}; }
  static Init truncated_normal(double std, double low, double high) {
    return {Kind::TruncatedNormal, 0, std, low, high};
  }
  static Init uniform(double low, double high) { return {Kind::Uniform, 0, 0, low, high}; }
};

struct ParamInit {
  std::string name;  ///< within its module: "weight"
  Init init;
};

/// The random numbers of one parameter.
struct InitStream {
  uint64_t seed = 0;
  std::string_view name;  ///< the parameter's full name
};

/// Fills `local` (any float dtype, contiguous, the part `box` of a tensor of `global_shape`) with its
/// elements of the stream. Values are computed in double on the CPU and rounded once to `local`'s dtype;
/// other devices get a copy.
///
/// Initial weights don't depend on the layout: each element is one uniform number from Philox4x32-10, keyed
/// by seed, parameter name and the element's global index, and mapped to a (truncated) normal by the inverse
/// distribution function (Wichura, AS241) in fixed-order double arithmetic. So the bits are the same on any
/// rank and mesh.
void fill(const at::Tensor& local, const Init& init, const InitStream& stream, at::IntArrayRef global_shape,
          const Box& box);

// [Note: hook slots]
// A call through nn::Ref runs hooks in this order, outermost first:
//   Fsdp > Label > Checkpoint > PrepareInput (tensor/context) > forward > PrepareOutput (tensor/context)
// so the order in which wrappers are applied doesn't matter, and a recomputation re-runs only the hooks
// inside the checkpoint slot. A slot holds at most one hook. Hooks see the tensors among a call's arguments
// and results and may replace them.

/// Pointers to the tensors of a call, in argument order, including those in optionals and vectors. Undefined
/// tensors are left out.
using TensorRefs = c10::SmallVector<at::Tensor*, 8>;
using TensorList = std::vector<at::Tensor>;

class HookHost;

/// The owner of a module's parameters (a group of fully_shard), for titan::parameters().
class ParamOwner {
 public:
  virtual ~ParamOwner() = default;
};

/// parallelize()'s record of the part that this rank has of each of a module's parameters.
class ParamParts {
 public:
  virtual ~ParamParts() = default;
};

/// A hook for the Fsdp, Label, PrepareInput and PrepareOutput slots. PrepareOutput runs only post_forward,
/// PrepareInput only pre_forward.
class CallHook {
 public:
  virtual ~CallHook() = default;
  virtual void pre_forward(HookHost& /*host*/, const TensorRefs& /*inputs*/) {}
  virtual void post_forward(HookHost& /*host*/, const TensorRefs& /*outputs*/) {}
};

/// A hook for the Checkpoint slot. `run` computes outputs from inputs and may be called again later with the
/// same inputs, detached.
class CheckpointHook {
 public:
  using Run = std::function<TensorList(const TensorList&)>;
  virtual ~CheckpointHook() = default;
  virtual TensorList call(HookHost& host, const TensorList& inputs, Run run) = 0;
};

/// The state that makes a module hookable. A module's Impl inherits it together with torch::nn::Module, as
/// nn::Module does.
class HookHost {
 public:
  HookHost();
  HookHost(const HookHost&) = delete;
  virtual ~HookHost();

  std::shared_ptr<CallHook> fsdp_hook;
  std::shared_ptr<CallHook> label_hook;
  std::shared_ptr<CheckpointHook> checkpoint_hook;
  std::shared_ptr<CallHook> prepare_input_hook;
  std::shared_ptr<CallHook> prepare_output_hook;
  std::shared_ptr<ParamOwner> param_owner;  ///< null: this module's own parameters are plain tensors
  std::shared_ptr<ParamParts> param_parts;  ///< null: this module's own parameters are whole

  /// The module itself (the other base of the same object).
  virtual torch::nn::Module& as_module() = 0;

  /// Dotted name from the root, for messages, labels and init; "" until name_modules(root) has run.
  const std::string& fqn() const { return fqn_; }
  void set_fqn(std::string fqn) { fqn_ = std::move(fqn); }

  /// Initial values of this module's own parameters. Empty for modules that initialize themselves
  /// (LibTorch's).
  const std::vector<ParamInit>& param_inits() const { return param_inits_; }

  /// Fills buffers that aren't parameters (rotary tables) on `device`; called by materialize().
  virtual void reset_buffers(const at::Device& /*device*/) {}

  /// False if this module's backward doesn't need its parameters' values (embedding, loss head), so that a
  /// sharded parameter isn't gathered again for it.
  virtual bool backward_reads_parameters() const { return true; }

  /// Makes `sink` receive the gradient of the parameter `name`. Returns false if the module leaves the
  /// gradient to autograd.
  virtual bool set_grad_sink(std::string_view /*name*/, std::shared_ptr<ops::GradSink> /*sink*/) {
    return false;
  }

  /// Call it at the start of a module's forward: throws Error with the module's name if the module is wrapped
  /// and was called without nn::Ref.
  void check_entered_through_ref() const;
  /// Throws Error if to(), clone() or the like would replace parameters that a wrapper holds.
  void refuse_if_wrapped(const char* operation) const;
  bool is_wrapped() const {
    return fsdp_hook || checkpoint_hook || prepare_input_hook || prepare_output_hook;
  }

 protected:
  std::vector<ParamInit> param_inits_;

 private:
  template <class Impl>
  friend class Ref;
  std::string fqn_;
  int depth_ = 0;  // running calls through Ref
};

/// Sets fqn() of every hookable module below `root` (root itself: "").
void name_modules(torch::nn::Module& root);

/// The hookable modules at and below `root`, in the order of torch::nn::Module::modules().
std::vector<HookHost*> hook_hosts(torch::nn::Module& root);

template <class Impl>
class Ref;

/// Any hookable module, independent of its Impl; the argument of wrappers. Keeps the module alive.
class AnyRef {
 public:
  template <class Impl>
  AnyRef(const Ref<Impl>& ref) : host_(ref.ptr().get()), module_(ref.ptr()) {}  // NOLINT: implicit by design
  template <class Impl>
  requires std::derived_from<Impl, HookHost> && std::derived_from<Impl, torch::nn::Module> AnyRef(
      std::shared_ptr<Impl> impl)
      : host_(impl.get()), module_(std::move(impl)) {}  // NOLINT

  HookHost& host() const { return *host_; }
  torch::nn::Module& module() const { return *module_; }
  const std::shared_ptr<torch::nn::Module>& ptr() const { return module_; }

 private:
  HookHost* host_;
  std::shared_ptr<torch::nn::Module> module_;
};

}  // namespace titan::nn

namespace titan {
using nn::Construct;
/// Parameters with sizes only: nothing is allocated on `device` until materialize().
inline Construct deferred(at::Device device, at::ScalarType dtype = at::kFloat) {
  return {device, dtype, true};
}
}  // namespace titan
