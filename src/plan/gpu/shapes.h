#pragma once

#include <ATen/core/function_schema.h>
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

/// Memory that LibTorch's code for CUDA takes from the allocator while an operation works, besides its results, in the order in which it takes
/// it: uninitialized tensors on the arguments' device. docs/virtual_gpu.md has a table.
class Temporaries {
 public:
  /// Takes what comes before the results.
  Temporaries(const std::string& name, std::span<const at::IValue> arguments, int64_t multiprocessors);
  ~Temporaries();
  Temporaries(const Temporaries&) = delete;
  Temporaries& operator=(const Temporaries&) = delete;
  /// Takes what comes after them.
  void take_rest();

 private:
  std::vector<at::Tensor> memory_;
  std::function<void()> rest_;
};

/// Whether LibTorch copies one tensor of a device to another by one cudaMemcpyAsync, and not by a kernel.
bool is_one_memcpy(const at::Tensor& self, const at::Tensor& source);

/// LibTorch's kernels for CUDA raise the versions of the tensors that an operation on lists changes, and not autograd, as it does for others.
void raise_versions_of_lists(const c10::FunctionSchema& schema, std::span<const at::IValue> arguments);

}  // namespace titan::plan
