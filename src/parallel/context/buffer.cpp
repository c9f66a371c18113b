#include "parallel/context/buffer.h"

#include <ATen/ops/empty.h>
#include <c10/util/accumulate.h>

namespace titan::context {

at::Tensor Buffer::get(at::IntArrayRef sizes, const at::TensorOptions& options) {
  const auto bytes = c10::multiply_integers(sizes) * static_cast<int64_t>(options.dtype().itemsize());
  if (!memory_.defined() || memory_.numel() < bytes || memory_.device() != options.device())
    memory_ = at::empty({bytes}, options.dtype(at::kByte));
  return memory_.narrow(0, 0, bytes).view(c10::typeMetaToScalarType(options.dtype())).view(sizes);
}

}  // namespace titan::context
