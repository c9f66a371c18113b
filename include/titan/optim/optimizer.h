#pragma once

// The optimizer of a training loop, and the registry of update rules.
//
//   titan::optim::Optimizer optimizer(titan::parameters(model), {.lr = 3e-4});
//   loss.backward();
//   optimizer.step();
//   optimizer.zero_grad();
//
// Each rank updates the parameters that it owns. The update of an element doesn't depend on other elements,
// so a shard is updated like a whole tensor, without communication. docs/examples/custom_optimizer/lion.cpp
// registers a rule.

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "titan/config/table.h"
#include "titan/core/registry.h"
#include "titan/parallel/parameters.h"
#include "titan/tensor/dtensor.h"

namespace titan::optim {

// ---- settings; keys and defaults are TorchTitan's

/// [optimizer]. A registered rule's other settings are in [optimizer.args].
struct OptimizerSettings {
  std::string name = "AdamW";  ///< an entry of optimizers()
  double lr = 8e-4;            ///< peak; the schedule multiplies it by a factor
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;  ///< applies to every parameter, norms too, as in TorchTitan
  std::string implementation = "fused";
  std::optional<std::string> state_dtype;  ///< "float32" or "bfloat16"; unset: the parameters' dtype
  bool stochastic_rounding = false;        ///< for all results that are kept in bf16
  /// The seed of the random numbers that round; not a key: [debug] seed.
  uint64_t seed = 0;
  /// Settings for some parameters, as "regex: key=value, ...", for example "norm: weight_decay=0". Keys are
  /// lr and the rule's numbers. The first entry whose regex matches a part of a parameter's name applies to
  /// it.
  config::StringList param_groups = {};
  /// [optimizer.args]: the Args that the rule was registered with; null: their defaults.
  std::shared_ptr<const void> args = {};

  /// Keys that every rule reads.
  static constexpr std::array kSharedKeys = {"name", "lr", "param_groups"};
};
void describe(config::Table<OptimizerSettings>& table);

/// The settings of a registered entry, with their type erased. Args is a struct with a
/// `describe(config::Table<Args>&)` beside it, whose fields are the keys in [optimizer.args] or
/// [lr_scheduler.args]; or it is Settings, and the entry reads [optimizer] or [lr_scheduler] itself.
template <class Settings>
class RegisteredArgs {
 public:
  template <class Args>
  static RegisteredArgs of() {
    RegisteredArgs result;
    config::Table<Args> table;
    describe(table);
    result.fields_ = table.fields();
    result.has_table_ = !std::is_same_v<Args, Settings>;
    result.make_ = [](const Settings& settings) {
      if constexpr (std::is_same_v<Args, Settings>) {
        return std::make_shared<Args>(settings);
      } else {
        const auto* args = static_cast<const Args*>(settings.args.get());
        return args ? std::make_shared<Args>(*args) : std::make_shared<Args>();
      }
    };
    return result;
  }

  const std::vector<config::FieldInfo>& fields() const { return fields_; }
  /// The table "args" with its defaults; empty if the entry has none.
  config::DynamicTable table() const {
    return has_table_ ? config::DynamicTable{fields_, make_({})} : config::DynamicTable{};
  }
  /// Keys of Settings that this entry doesn't read.
  std::vector<std::string> unread_keys() const {
    std::vector<std::string> keys;
    if (!has_table_) return keys;
    config::Table<Settings> table;
    describe(table);
    const auto& shared = Settings::kSharedKeys;
    for (const config::FieldInfo& field : table.fields())
      if (field.role == config::FieldInfo::Role::Setting &&
          std::find(shared.begin(), shared.end(), field.key) == shared.end())
        keys.push_back(field.key);
    return keys;
  }
  /// A new Args with the values in `settings`.
  std::shared_ptr<void> make(const Settings& settings) const { return make_(settings); }

 private:
  std::vector<config::FieldInfo> fields_;
  std::function<std::shared_ptr<void>(const Settings&)> make_;
  bool has_table_ = true;
};

// ---- rules

/// The parameters that a rule updates in one call, which share device, dtype and settings. Entry i of each
/// list belongs to one parameter.
struct Update {
  double lr = 0;  ///< this step's learning rate
  /// Undefined, or an fp32 scalar on the device to use in place of `lr`: the step is being recorded as a CUDA graph, and each
  /// launch has another learning rate.
  at::Tensor lr_on_device;
  std::vector<at::Tensor> params;            ///< this rank's part of each parameter
  std::vector<const Parameter*> parameters;  ///< their names, and places in the whole parameters
  std::vector<at::Tensor> grads;  ///< laid out as `params`; read-only, unless there is a grad_factor
  /// A list for each name in OptimizerRule::state, laid out as `params`, in the rule's state_dtype.
  std::vector<std::vector<at::Tensor>> state;
  /// fp32 scalars: each parameter's number of updates so far, including this one. They are on the host unless
  /// the rule runs on the device.
  std::vector<at::Tensor> steps;
  at::Tensor skip;  ///< undefined, or an fp32 scalar on the device; if it is 1, nothing may change
  /// Undefined, or a double scalar on the device that the rule multiplies `grads` by, in place or while it reads them.
  at::Tensor grad_factor;
};

/// An update rule. Args is the struct of its settings, with a `describe(config::Table<Args>&)` beside it,
/// whose fields are the keys in [optimizer.args]; or OptimizerSettings, for a rule that reads [optimizer]
/// itself.
template <class Args>
struct OptimizerRule {
  /// Names of the tensors that the rule keeps for each parameter. They are laid out as the parameter, zero at
  /// first, and saved as PARAMETER.NAME next to PARAMETER.step.
  std::vector<std::string> state = {};
  std::function<void(const Args&, const Update&)> step;
  /// Whether `step` never waits for the device. Then Update::steps are on the device, and `skip` may be
  /// given. Default: no.
  std::function<bool(const Args&)> runs_on_device = {};
  /// Whether `step` takes Update::grad_factor for parameters of this one's device and dtype, so that clipping needs no
  /// pass over the gradients of its own. Default: no.
  std::function<bool(const Args&, const at::Tensor& param)> takes_grad_factor = {};
  /// Whether `step` takes Update::lr_on_device for parameters of this one's device and dtype, with the same results as for
  /// `lr`. Steps with compile.enable are then recorded with the optimizer's part. Default: no.
  std::function<bool(const Args&, const at::Tensor& param)> takes_lr_on_device = {};
  /// The dtype of the state of parameters with this dtype. Default: the same.
  std::function<at::ScalarType(const Args&, at::ScalarType of_param)> state_dtype = {};
};

/// A registered rule with its Args erased: `args` in the calls points to the result of args.make().
class OptimizerSpec {
 public:
  template <class Args>
  OptimizerSpec(OptimizerRule<Args> rule)  // NOLINT(google-explicit-constructor): for Registry::add
      : args(RegisteredArgs<OptimizerSettings>::of<Args>()),
        state(std::move(rule.state)),
        step([step = std::move(rule.step)](const void* args, const Update& update) {
          step(*static_cast<const Args*>(args), update);
        }),
        runs_on_device([runs = std::move(rule.runs_on_device)](const void* args) {
          return runs && runs(*static_cast<const Args*>(args));
        }),
        takes_grad_factor(erased(std::move(rule.takes_grad_factor))),
        takes_lr_on_device(erased(std::move(rule.takes_lr_on_device))),
        reads_state_dtype(static_cast<bool>(rule.state_dtype)),
        state_dtype([dtype = std::move(rule.state_dtype)](const void* args, at::ScalarType of_param) {
          return dtype ? dtype(*static_cast<const Args*>(args), of_param) : of_param;
        }) {}

  RegisteredArgs<OptimizerSettings> args;
  std::vector<std::string> state;
  std::function<void(const void* args, const Update&)> step;
  std::function<bool(const void* args)> runs_on_device;
  std::function<bool(const void* args, const at::Tensor& param)> takes_grad_factor;
  std::function<bool(const void* args, const at::Tensor& param)> takes_lr_on_device;
  bool reads_state_dtype =
      false;  ///< false: OptimizerSettings::state_dtype and stochastic_rounding have no effect
  std::function<at::ScalarType(const void* args, at::ScalarType of_param)> state_dtype;

 private:
  template <class Args>
  static std::function<bool(const void*, const at::Tensor&)> erased(
      std::function<bool(const Args&, const at::Tensor&)> takes) {
    return [takes = std::move(takes)](const void* args, const at::Tensor& param) {
      return takes && takes(*static_cast<const Args*>(args), param);
    };
  }
};

/// The rules that optimizer.name may name: "AdamW", "Adam", and rules that users add:
///
///   const OptimizerRule<LionArgs> lion{.state = {"exp_avg"}, .step = lion_step};
///   titan::optim::optimizers().add("lion", lion);
Registry<OptimizerSpec>& optimizers();

class Optimizer {
 public:
  /// Takes the `parameters` that require gradients, which must be materialized; state is allocated at its
  /// first use. Throws ConfigError for an unknown rule, and for groups that don't parse or that match no
  /// parameter here or in `elsewhere` (names of other pipeline ranks' parameters). Throws Error for a compute
  /// parameter of fully_shard, because only its shard can be updated.
  Optimizer(const std::vector<Parameter>& parameters, const OptimizerSettings& settings,
            const std::vector<std::string>& elsewhere = {});
  ~Optimizer();
  Optimizer(Optimizer&&) noexcept;
  Optimizer& operator=(Optimizer&&) noexcept;

  /// Updates the parameters by the gradients in `data.local.grad()`; parameters without a gradient are
  /// unchanged.
  void step();
  /// The same unless `skip` is 1. `skip` is an fp32 scalar on the parameters' device, which the host doesn't
  /// read. The gradients are first multiplied by `grad_factor`, if it is defined: LaunchedGradNorm::factor. The
  /// rule does that while it updates, if it can. Requires can_skip_on_device().
  void step_unless(const at::Tensor& skip, const at::Tensor& grad_factor = {});
  bool can_skip_on_device() const;

  /// Whether record_step_unless() can be called: the rule takes the learning rates from memory on the device.
  bool can_be_recorded() const;
  /// step_unless() for a recording (dist/work_graph.h). Each launch takes the learning rates that write_lrs() wrote last.
  /// LibTorch's fused kernels raise no version counters: the caller raises the parameters' at each launch.
  void record_step_unless(const at::Tensor& skip, const at::Tensor& grad_factor = {});
  /// Queues a write of the current learning rates to memory on the device. Call it before the recording and each launch.
  void write_lrs();

  /// Drops the gradients, or fills them with zeros if `set_to_none` is false.
  void zero_grad(bool set_to_none = true);

  /// Multiplies every group's peak learning rate from now on: LrSchedule::factor.
  void set_lr_factor(double factor);
  /// The current learning rate of the parameters that no group names.
  double lr() const;

  /// The optimizer's state, by parameter and name: the rule's tensors, laid out as the parameter, and "step",
  /// an fp32 scalar with the parameter's number of updates. Shares memory with the optimizer. Parameters with the
  /// same name (a tied weight in two stages of a pipeline rank) have an entry each, in the constructor's order.
  using ParameterState = std::map<std::string, DTensor>;
  std::multimap<std::string, ParameterState> state();
  /// The state's tensors that exist by now.
  std::vector<at::Tensor> allocated_state() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace titan::optim
