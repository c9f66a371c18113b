#pragma once

// Parameters of one rank, without a model.

#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "titan/parallel/parameters.h"

namespace titan::testing {

inline Parameter make_parameter(const std::string& name, const at::Tensor& values) {
  Parameter parameter;
  parameter.name = name;
  parameter.data.local = values.detach().clone().requires_grad_(true);
  parameter.data.global_shape = values.sizes().vec();
  parameter.data.box = {std::vector<int64_t>(values.dim(), 0), values.sizes().vec()};
  parameter.compute = parameter.data.local;
  return parameter;
}

inline void set_grad(const Parameter& parameter, const at::Tensor& grad) {
  at::Tensor local = parameter.data.local;
  local.mutable_grad() = grad;
}

}  // namespace titan::testing
