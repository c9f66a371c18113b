#pragma once

// The tables [optimizer] and [lr_scheduler]; keys and defaults are TorchTitan's.

#include <cstdint>
#include <optional>
#include <string>

#include "titan/config/table.h"

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

}  // namespace titan::optim
