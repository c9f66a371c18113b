#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "plan/gpu/stand_ins.h"
#include "runtime/virtual_gpu.h"

namespace virtual_gpu {

using titan::plan::for_each_tensor;
using titan::plan::StandIns;

/// The bytes between a tensor's first and last element.
Range range_of(const at::Tensor& tensor, bool is_written);

/// Queues work that reads and writes CUDA tensors on the current stream. In memory-only mode, work on large tensors is
/// left out.
void run_on_device(std::string name, const std::vector<at::Tensor>& reads,
                   const std::vector<at::Tensor>& writes, std::function<void()> work);

}  // namespace virtual_gpu
