#include <cmath>
#include <limits>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/isinf.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/masked_select.h>
#include <ATen/ops/view_as_real.h>

#include "titan/core/error.h"
#include "titan/tensor/param_storage.h"
#include "titan/train/nan_trace.h"

namespace titan::train {

bool is_finite(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.numel() == 0 || tensor.is_meta() || is_deferred(tensor)) return true;
  if (!at::isFloatingType(tensor.scalar_type()) && !at::isComplexType(tensor.scalar_type())) return true;
  const at::NoGradGuard no_grad;
  return at::isfinite(tensor).all().item<bool>();
}

std::string describe_numbers(const at::Tensor& tensor) {
  if (!tensor.defined()) return "none";
  const std::string type = titan::str(tensor.scalar_type(), " ", tensor.sizes());
  if (tensor.is_meta() || is_deferred(tensor)) return type + ", without memory";
  if (tensor.numel() == 0) return type + ", empty";
  const at::NoGradGuard no_grad;
  const bool is_complex = at::isComplexType(tensor.scalar_type());
  const at::Tensor parts = is_complex ? at::view_as_real(tensor.detach().resolve_conj()) : tensor.detach();
  const at::Tensor values = parts.to(at::kDouble);
  const at::Tensor finite = values.masked_select(at::isfinite(values));
  const std::string counts = titan::str(at::isnan(values).sum().item<int64_t>(), " NaN, ",
                                        at::isinf(values).sum().item<int64_t>(), " Inf");
  if (finite.numel() == 0) return titan::str(type, ": ", counts);
  return titan::str(type, ": min ", finite.min().item<double>(), ", max ", finite.max().item<double>(),
                    ", mean ", finite.mean().item<double>(), ", ", counts);
}

}  // namespace titan::train
