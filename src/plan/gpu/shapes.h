#pragma once

#include <ATen/core/ivalue.h>

#include <functional>
#include <span>
#include <string>
#include <vector>

namespace titan::plan {

/// From the arguments, as tensors on the meta device, to the results. For operations whose meta kernel is not part of
/// LibTorch's C++ libraries.
using ShapeRule = std::function<torch::jit::Stack(const torch::jit::Stack&)>;

/// The rule for an operation, or null.
const ShapeRule* shape_rule(const std::string& name);

/// Memory that LibTorch's kernel for CUDA takes from the allocator while it works, besides its results, where that isn't
/// little: uninitialized tensors on the arguments' device. docs/virtual_gpu.md has a table.
std::vector<at::Tensor> temporaries_of(const std::string& name, std::span<const at::IValue> arguments,
                                       int64_t multiprocessors);

}  // namespace titan::plan
