#pragma once

// Hyper-parameters by parameter name.

#include <string>
#include <vector>

#include "titan/optim/optimizer.h"

namespace titan::optim {

/// What the update of a parameter depends on besides its gradient.
struct AdamOptions {
  double lr = 0;
  double beta1 = 0;
  double beta2 = 0;
  double eps = 0;
  double weight_decay = 0;
};

/// Group 0 holds the defaults, group i the i-th entry of settings.param_groups.
struct GroupAssignment {
  std::vector<AdamOptions> groups;
  std::vector<size_t> group_of;  ///< one for each name
};

/// Throws ConfigError with every entry that doesn't parse or names no parameter, be it of `elsewhere`.
GroupAssignment assign_groups(const OptimizerSettings& settings, const std::vector<std::string>& names,
                              const std::vector<std::string>& elsewhere = {});

}  // namespace titan::optim
