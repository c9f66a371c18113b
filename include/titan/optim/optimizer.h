#pragma once

// The tables [optimizer] and [lr_scheduler]; keys and defaults are TorchTitan's.

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "titan/config/table.h"
#include "titan/parallel/parameters.h"
#include "titan/tensor/dtensor.h"

namespace titan::optim {

/// [optimizer]
struct OptimizerSettings {
  std::string name = "AdamW";
  double lr = 8e-4;  ///< peak; the schedule multiplies it by a factor in [0, 1]
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;  ///< of every parameter, norms too, as TorchTitan's
  std::string implementation = "fused";
  /// Exceptions for some parameters, one "regex: key=value, ..." each, with the keys lr, beta1, beta2, eps
  /// and weight_decay: "norm: weight_decay=0". The first whose regex is found in a parameter's name counts
  /// for it.
  config::StringList param_groups;
};

/// [lr_scheduler]
struct LrSchedulerSettings {
  int64_t warmup_steps = 200;
  std::optional<int64_t> total_steps;  ///< length of the schedule; unset: training.steps
  std::optional<double> decay_ratio;   ///< part of total_steps that decays; unset: all after the warmup
  std::string decay_type = "linear";
  double min_lr_factor = 0;  ///< floor of the decay, as a part of the peak
};

void describe(config::Table<OptimizerSettings>& table);
void describe(config::Table<LrSchedulerSettings>& table);

// Adam and AdamW over the parameters that this rank owns. Elementwise, so a shard is stepped like a whole
// tensor and nothing is communicated.

/// What Adam remembers of one parameter. Shares memory with the optimizer.
struct AdamState {
  DTensor exp_avg;     ///< laid out as the parameter, of its dtype
  DTensor exp_avg_sq;  ///< the same
  DTensor step;        ///< fp32 scalar, replicated: how often the parameter was stepped
};

class Optimizer {
 public:
  /// Takes those of `parameters` that require gradients (the others are frozen), which must be materialized;
  /// state is made at its first use. Throws ConfigError for groups that don't parse or match no
  /// parameter, neither here nor of `elsewhere` (names of other pipeline ranks' parameters), and Error for a
  /// compute parameter of fully_shard (its shard is what can be stepped).
  Optimizer(const std::vector<Parameter>& parameters, const OptimizerSettings& settings,
            const std::vector<std::string>& elsewhere = {});
  ~Optimizer();
  Optimizer(Optimizer&&) noexcept;
  Optimizer& operator=(Optimizer&&) noexcept;

  /// One update from the gradients in `data.local.grad()`; parameters without one are left as they are.
  void step();
  /// The same unless `skip` is 1: an fp32 scalar on the parameters' device, which the host doesn't read. Only
  /// with the fused implementation.
  void step_unless(const at::Tensor& skip);
  /// Has the fused implementation.
  bool can_skip_on_device() const;
  /// Forgets the gradients, or fills them with zeros where the buffers are to be kept.
  void zero_grad(bool set_to_none = true);

  /// Multiplies every group's peak learning rate from now on: LrSchedule::factor.
  void set_lr_factor(double factor);
  /// The learning rate in use of the parameters that no group names.
  double lr() const;

  /// By parameter name.
  std::map<std::string, AdamState> state();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace titan::optim
