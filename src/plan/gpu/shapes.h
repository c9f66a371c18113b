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

/// Memory that LibTorch's code for CUDA takes from the allocator while an operation works, besides its results, where that isn't little: in the
/// order in which it is taken, and freed in reverse, as tensors on the arguments' device. docs/virtual_gpu.md has a table.
class Temporaries {
 public:
  /// Takes what comes before the results. The arguments outlive take_rest().
  Temporaries(const std::string& name, std::span<const at::IValue> arguments, int64_t multiprocessors,
              int64_t compute_capability);
  ~Temporaries();
  Temporaries(const Temporaries&) = delete;
  Temporaries& operator=(const Temporaries&) = delete;
  /// Takes what comes after them.
  void take_rest();

 private:
  void copy_if_strided(const at::Tensor& t);
  void add(std::vector<at::Tensor> tensors);

  std::vector<at::Tensor> memory_;
  std::function<void()> rest_;
};

/// Whether LibTorch copies one tensor of a device to another by one cudaMemcpyAsync, and not by a kernel.
bool is_one_memcpy(const at::Tensor& self, const at::Tensor& source);

/// An operation on lists raises the versions of the tensors that it changes in LibTorch's kernels, and not in autograd, as others do.
void raise_versions_of_lists(const c10::FunctionSchema& schema, std::span<const at::IValue> arguments,
                             bool is_cpu);

}  // namespace titan::plan
