#include "parallel/fsdp/host_shards.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "tensor/resident_memory.h"

namespace titan::fsdp {

at::Tensor host_zeros(int64_t numel, at::ScalarType dtype, at::Device device) {
  const auto options = at::TensorOptions().dtype(dtype).device(at::kCPU);
  return device.is_cuda() ? at::zeros({numel}, options.pinned_memory(true))
                          : resident_zeros({numel}, options);
}

at::Tensor host_empty(int64_t numel, at::ScalarType dtype, at::Device device) {
  const auto options = at::TensorOptions().dtype(dtype).device(at::kCPU);
  return device.is_cuda() ? at::empty({numel}, options.pinned_memory(true))
                          : resident_empty({numel}, options);
}

}  // namespace titan::fsdp
