#include "float8/composite.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/bitwise_and.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/where.h>

#include "titan/float8/cast.h"

namespace titan::float8::composite {

namespace {
constexpr double kSmallestAmax = 1e-12;  // torchao's
}

at::Tensor amax(const at::Tensor& x, std::optional<int64_t> dim) {
  const at::Tensor magnitude = x.abs();
  if (!dim) return magnitude.max().to(at::kFloat);
  return magnitude.amax({*dim}).unsqueeze(1).to(at::kFloat);
}

// A power of two has no fraction: its bits are the exponent's. Of a NaN that would make an infinity.
at::Tensor scale_of(const at::Tensor& amax, at::ScalarType dtype, bool power_of_two) {
  const at::Tensor scale =
      (largest_value(dtype) / amax.to(at::kDouble).clamp_min(kSmallestAmax)).to(at::kFloat);
  if (!power_of_two) return scale;
  const at::Tensor rounded = scale.view(at::kInt).bitwise_and(0x7f800000).view(at::kFloat);
  return at::where(at::isnan(scale), scale, rounded);
}

at::Tensor cast(const at::Tensor& x, const at::Tensor& scale, at::ScalarType dtype, bool transposed) {
  const double largest = largest_value(dtype);
  const at::Tensor from = transposed ? x.t() : x;
  return (from.to(at::kFloat) * scale).clamp(-largest, largest).to(dtype).contiguous();
}

}  // namespace titan::float8::composite
