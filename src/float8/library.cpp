// What the dispatcher knows of float8. CPU kernels register themselves in src/float8/cpu, CUDA ones in the
// plugin. None is differentiable: products are (src/ops).

#include <torch/library.h>

#include <ATen/ops/empty.h>

#include "float8/composite.h"
#include "ops/operators.h"
#include "titan/core/error.h"
#include "titan/float8/cast.h"

namespace titan::float8 {

namespace {

at::Tensor amax_meta(const at::Tensor& x, std::optional<int64_t> dim) {
  const auto options = x.options().dtype(at::kFloat);
  return dim ? at::empty({x.size(1 - *dim), 1}, options) : at::empty({}, options);
}
at::Tensor scale_meta(const at::Tensor& amax, at::ScalarType /*dtype*/, bool /*power_of_two*/) {
  return at::empty(amax.sizes(), amax.options());
}
at::Tensor cast_meta(const at::Tensor& x, const at::Tensor& /*scale*/, at::ScalarType dtype,
                     bool transposed) {
  const auto options = x.options().dtype(dtype);
  return transposed ? at::empty({x.size(1), x.size(0)}, options) : at::empty(x.sizes(), options);
}

TORCH_LIBRARY_FRAGMENT(titan, m) {
  // Largest magnitude of x [N, K], fp32: [], along dim 1 [N, 1], along dim 0 [K, 1].
  m.def("float8_amax(Tensor x, int? dim) -> Tensor");
  m.def("float8_scale(Tensor amax, ScalarType dtype, bool power_of_two) -> Tensor");
  // scale: [], or one for each row of the result [N, K] ([K, N] if transposed).
  m.def("float8_cast(Tensor x, Tensor scale, ScalarType dtype, bool transposed) -> Tensor");
}
TORCH_LIBRARY_IMPL(titan, CompositeExplicitAutograd, m) {
  m.impl("float8_amax", composite::amax);
  m.impl("float8_scale", composite::scale_of);
  m.impl("float8_cast", composite::cast);
}
TORCH_LIBRARY_IMPL(titan, Meta, m) {
  m.impl("float8_amax", amax_meta);
  m.impl("float8_scale", scale_meta);
  m.impl("float8_cast", cast_meta);
}

}  // namespace

double largest_value(at::ScalarType dtype) {
  TITAN_CHECK(dtype == at::kFloat8_e4m3fn || dtype == at::kFloat8_e5m2, "no Float8 dtype of ours: ", dtype,
              "; there are Float8_e4m3fn and Float8_e5m2");
  return dtype == at::kFloat8_e4m3fn ? 448.0 : 57344.0;
}

at::Tensor amax(const at::Tensor& x, Over over) {
  TITAN_CHECK(x.dim() == 2 && x.numel() > 0, "float8: the largest magnitude of ", x.sizes(),
              "; expected a matrix that isn't empty");
  using Signature = at::Tensor(const at::Tensor&, std::optional<int64_t>);
  static const auto operation = ops::find_operator<Signature>("titan::float8_amax");
  const std::optional<int64_t> dim = over == Over::Row ? std::optional<int64_t>(1) : 0;
  return operation.call(x, over == Over::Matrix ? std::nullopt : dim);
}

at::Tensor scale_of(const at::Tensor& amax, at::ScalarType dtype, bool power_of_two) {
  using Signature = at::Tensor(const at::Tensor&, at::ScalarType, bool);
  static const auto operation = ops::find_operator<Signature>("titan::float8_scale");
  return operation.call(amax, dtype, power_of_two);
}

at::Tensor cast(const at::Tensor& x, const at::Tensor& scale, at::ScalarType dtype, bool transposed) {
  largest_value(dtype);  // throws where it isn't one of ours
  using Signature = at::Tensor(const at::Tensor&, const at::Tensor&, at::ScalarType, bool);
  static const auto operation = ops::find_operator<Signature>("titan::float8_cast");
  const int64_t rows = transposed ? x.size(1) : x.size(0);
  TITAN_CHECK(
      x.dim() == 2 && scale.scalar_type() == at::kFloat && (scale.numel() == 1 || scale.numel() == rows),
      "float8: ", scale.scalar_type(), " scales ", scale.sizes(), " for ", x.sizes(),
      transposed ? " transposed" : "", "; expected fp32, one or one for each of the result's rows");
  return operation.call(x, scale, dtype, transposed);
}

}  // namespace titan::float8
