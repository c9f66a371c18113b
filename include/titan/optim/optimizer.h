#pragma once

// Optimizers: the object that a training loop steps, and the registry of update rules.
//
//   titan::optim::Optimizer optimizer(titan::parameters(model), {.lr = 3e-4});
//   loss.backward();
//   optimizer.step();
//   optimizer.zero_grad();
//
// Each rank steps the parameters that it owns. The update of one element depends on no other, so a shard is
// stepped like a whole tensor and nothing is communicated. docs/examples/custom_optimizer/lion.cpp registers
// a rule.

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <memory>
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
  /// Exceptions for some parameters, one "regex: key=value, ..." each: "norm: weight_decay=0". Keys are lr and
  /// the rule's numbers. A parameter follows the first entry whose regex is found in its name.
  config::StringList param_groups = {};
  /// [optimizer.args]: the Args that the rule was registered with; null: their defaults.
  std::shared_ptr<const void> args = {};

  /// Keys that every rule reads.
  static constexpr std::array kSharedKeys = {"name", "lr", "param_groups"};
};
void describe(config::Table<OptimizerSettings>& table);

/// The settings of a registered entry, their type erased. Args is a struct with a
/// `describe(config::Table<Args>&)` beside it, whose fields are the keys of [optimizer.args] or
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
  /// The table "args" with its defaults; empty where the entry has none.
  config::DynamicTable table() const {
    return has_table_ ? config::DynamicTable{fields_, make_({})} : config::DynamicTable{};
  }
  /// Keys of Settings that mean nothing to this entry.
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
  /// An Args of its own with the values of `settings`.
  std::shared_ptr<void> make(const Settings& settings) const { return make_(settings); }

 private:
  std::vector<config::FieldInfo> fields_;
  std::function<std::shared_ptr<void>(const Settings&)> make_;
  bool has_table_ = true;
};

// ---- rules

/// What a rule updates in one call: parameters that share device, dtype and settings. Entry i of each list
/// belongs to one parameter.
struct Update {
  double lr = 0;                   ///< of this step
  std::vector<at::Tensor> params;  ///< this rank's part of each parameter
  std::vector<at::Tensor> grads;   ///< laid out as `params`; read-only
  std::vector<std::vector<at::Tensor>>
      state;                      ///< a list for each of OptimizerRule::state, laid out as `params`
  std::vector<at::Tensor> steps;  ///< fp32 scalars: updates of each so far, this one included; on the host
                                  ///< unless the rule runs on the device
  at::Tensor skip;  ///< undefined, or an fp32 scalar on the device: where it is 1, nothing may change
};

/// An update rule. Args are its settings: a struct with a `describe(config::Table<Args>&)` beside it, whose
/// fields are the keys of [optimizer.args]; or OptimizerSettings, for a rule that reads [optimizer] itself.
template <class Args>
struct OptimizerRule {
  /// Names of the tensors that the rule keeps for each parameter: laid out as the parameter, zero at first,
  /// saved as PARAMETER.NAME beside PARAMETER.step.
  std::vector<std::string> state = {};
  std::function<void(const Args&, const Update&)> step;
  /// Whether `step` never waits for the device: then Update::steps lie there, and `skip` may be given.
  /// Default: no.
  std::function<bool(const Args&)> runs_on_device = {};
};

/// A registered rule with its Args erased: `args` below points to what args.make() returned.
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
        }) {}

  RegisteredArgs<OptimizerSettings> args;
  std::vector<std::string> state;
  std::function<void(const void* args, const Update&)> step;
  std::function<bool(const void* args)> runs_on_device;
};

/// What optimizer.name may name: "AdamW", "Adam", and what users add:
///
///   titan::optim::optimizers().add("lion", OptimizerRule<LionArgs>{.state = {"exp_avg"}, .step = lion_step});
Registry<OptimizerSpec>& optimizers();

class Optimizer {
 public:
  /// Takes those of `parameters` that require gradients (the others are frozen), which must be materialized;
  /// state is made at its first use. Throws ConfigError for an unknown rule, for groups that don't parse or
  /// that match no parameter here or in `elsewhere` (names of other pipeline ranks' parameters), and Error for a
  /// compute parameter of fully_shard (its shard is what can be stepped).
  Optimizer(const std::vector<Parameter>& parameters, const OptimizerSettings& settings,
            const std::vector<std::string>& elsewhere = {});
  ~Optimizer();
  Optimizer(Optimizer&&) noexcept;
  Optimizer& operator=(Optimizer&&) noexcept;

  /// One update from the gradients in `data.local.grad()`; parameters without one are left as they are.
  void step();
  /// The same unless `skip` is 1: an fp32 scalar on the parameters' device, which the host doesn't read. Only
  /// where can_skip_on_device().
  void step_unless(const at::Tensor& skip);
  bool can_skip_on_device() const;
  /// Forgets the gradients, or fills them with zeros where the buffers are to be kept.
  void zero_grad(bool set_to_none = true);

  /// Multiplies every group's peak learning rate from now on: LrSchedule::factor.
  void set_lr_factor(double factor);
  /// The current learning rate of the parameters that no group names.
  double lr() const;

  /// What the optimizer remembers, by parameter and name: the rule's tensors, laid out as the parameter, and
  /// "step", an fp32 scalar: how often the parameter was stepped. Shares memory with the optimizer.
  using ParameterState = std::map<std::string, DTensor>;
  std::map<std::string, ParameterState> state();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace titan::optim
