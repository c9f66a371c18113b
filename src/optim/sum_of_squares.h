#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

namespace titan::optim {

/// The sum of the squares of all elements of all tensors, in double: LibTorch's fp32 norm of a large CPU
/// tensor is low by up to 8e-5. Float dtypes, any device; on a GPU it waits for the result. On the CPU the
/// order of additions depends on the sizes alone, not on the number of threads.
double sum_of_squares(const std::vector<at::Tensor>& tensors);

/// The same as a scalar on `device`, where it is computed; the host doesn't wait.
at::Tensor sum_of_squares_on(at::Device device, const std::vector<at::Tensor>& tensors);

}  // namespace titan::optim
