#include "parallel/context/buffer.h"

#include <ATen/ops/empty.h>
#include <c10/util/accumulate.h>

namespace titan::context {

at::Tensor Buffer::get(at::IntArrayRef sizes, const at::TensorOptions& options) {
  const int64_t count = c10::multiply_integers(sizes);
  const bool fits = memory_.defined() && memory_.numel() >= count &&
                    memory_.scalar_type() == c10::typeMetaToScalarType(options.dtype()) &&
                    memory_.device() == options.device();
  if (!fits) memory_ = at::empty({count}, options);
  return memory_.narrow(0, 0, count).view(sizes);
}

}  // namespace titan::context
