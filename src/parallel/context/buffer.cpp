#include "parallel/context/buffer.h"

#include <ATen/ops/empty.h>
#include <c10/util/accumulate.h>

namespace titan::context {

at::Tensor Buffer::get(at::IntArrayRef sizes, const at::TensorOptions& options) {
  const at::ScalarType dtype = c10::typeMetaToScalarType(options.dtype());
  if (last_.defined() && last_.sizes() == sizes && last_.scalar_type() == dtype &&
      last_.device() == options.device())
    return last_;
  const auto bytes = c10::multiply_integers(sizes) * static_cast<int64_t>(options.dtype().itemsize());
  if (!memory_.defined() || memory_.numel() < bytes || memory_.device() != options.device()) {
    // The old memory goes before the new one comes.
    last_.reset();
    memory_.reset();
    memory_ = at::empty({bytes}, options.dtype(at::kByte));
  }
  last_ = memory_.narrow(0, 0, bytes).view(dtype).view(sizes);
  return last_;
}

}  // namespace titan::context
