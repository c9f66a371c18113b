#pragma once

#include <ATen/core/ivalue.h>

#include <functional>
#include <string>

namespace titan::plan {

/// From the arguments, as tensors on the meta device, to the results. For operations whose meta kernel is not part of
/// LibTorch's C++ libraries.
using ShapeRule = std::function<torch::jit::Stack(const torch::jit::Stack&)>;

/// The rule for an operation, or null.
const ShapeRule* shape_rule(const std::string& name);

}  // namespace titan::plan
