// The casts as operations of the dispatcher: schemas, compositions of LibTorch's operations, and shapes on
// the meta device. CPU kernels register themselves in src/float8/cpu, CUDA kernels in the plugin. None of
// these is differentiable; products are (src/ops).

#include "float8/cast.h"

#include <cmath>
#include <limits>
#include <vector>

#include <torch/library.h>

#include <ATen/TensorOperators.h>
#include <ATen/ops/bitwise_and.h>
#include <ATen/ops/bitwise_left_shift.h>
#include <ATen/ops/bitwise_right_shift.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>

#include "ops/operators.h"
#include "titan/core/error.h"

namespace titan::float8 {

// ---- compositions

namespace composite {
namespace {

constexpr double kSmallestAmax = 1e-12;  // torchao's

at::Tensor mantissa_above(const at::Tensor& bits, int64_t bound) {
  return bits.bitwise_and(0x7fffff).gt(bound).to(at::kInt);
}

at::Tensor exponents_down(const at::Tensor& bits, at::ScalarType dtype) {
  return (at::bitwise_right_shift(bits, 23) - largest_exponent(dtype)).clamp_min(0);
}

// On a GPU, LibTorch would replace division by a number with multiplication by its reciprocal.
at::Tensor exponents_up(const at::Tensor& largest, at::ScalarType dtype) {
  const at::Tensor quotient = largest / at::full({}, largest_value(dtype), largest.options());
  const at::Tensor bits = quotient.view(at::kInt), exponent = at::bitwise_right_shift(bits, 23);
  return at::where(exponent.eq(0), mantissa_above(bits, 0x400000), exponent + mantissa_above(bits, 0));
}

// [Note: factors of blocks] A block is multiplied by 2^(127 - exponent). For exponent 0 the factor is
// torchao's: half of that, or 1 if exponents are rounded up. If the block isn't finite, the factor is 0, and
// the scale makes its values NaN.
at::Tensor factors(const at::Tensor& exponents, bool round_up) {
  const at::Tensor bits = at::bitwise_left_shift(254 - exponents.clamp_min(1), 23);
  const at::Tensor factor = (bits.view(at::kFloat)).masked_fill(exponents.eq(kNotFinite), 0);
  return round_up ? factor.masked_fill(exponents.eq(0), 1) : factor;
}

}  // namespace

at::Tensor amax(const at::Tensor& x, std::optional<int64_t> dim) {
  const at::Tensor magnitude = x.abs();
  if (!dim) return magnitude.max().to(at::kFloat);
  return magnitude.amax({*dim}).unsqueeze(1).to(at::kFloat);
}

at::Tensor amax_many(at::TensorList xs) {
  std::vector<at::Tensor> found;
  for (const at::Tensor& x : xs) found.push_back(amax(x, std::nullopt));
  return at::stack(found);
}

// A power of two has only exponent bits and no fraction. A NaN stays unchanged, because without its fraction
// it would be an infinity.
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

std::tuple<at::Tensor, at::Tensor> cast_blocks(const at::Tensor& x, at::ScalarType dtype, bool round_up,
                                               bool transposed) {
  at::Tensor from = (transposed ? x.t() : x).to(at::kFloat);
  const int64_t rest = from.size(1) % kBlock;
  if (rest != 0) from = at::constant_pad_nd(from, {0, kBlock - rest});
  const at::Tensor blocks = from.contiguous().view({from.size(0), from.size(1) / kBlock, kBlock});
  const at::Tensor largest = blocks.abs().amax({2}), bits = largest.view(at::kInt);
  const at::Tensor exponents = (round_up ? exponents_up(largest, dtype) : exponents_down(bits, dtype))
                                   .masked_fill(bits.ge(0x7f800000), kNotFinite);
  const double end = largest_value(dtype);
  const at::Tensor data =
      (blocks * factors(exponents, round_up).unsqueeze(2)).clamp(-end, end).to(dtype).view(from.sizes());
  return {data, exponents.to(at::kByte).view(at::kFloat8_e8m0fnu)};
}

at::Tensor delayed_scale(const at::Tensor& amax, const at::Tensor& pending, const at::Tensor& largest,
                         at::ScalarType dtype, bool power_of_two, bool records) {
  const at::Tensor finite = at::isfinite(amax);
  if (records) pending.copy_(at::maximum(pending, at::where(finite, amax, 0.0)));
  const at::Tensor scale = scale_of(at::where(largest.gt(0), largest, amax), dtype, power_of_two);
  return at::where(finite, scale, std::numeric_limits<double>::quiet_NaN());
}

}  // namespace composite

// ---- shapes, and registration

namespace {

using DataAndScale = std::tuple<at::Tensor, at::Tensor>;

TORCH_LIBRARY_FRAGMENT(titan, m) {
  // Largest magnitude of x [N, K], fp32: [], along dim 1 [N, 1], along dim 0 [K, 1]; amax_many: [n], for each
  // x.
  m.def("float8_amax(Tensor x, int? dim) -> Tensor");
  m.def("float8_amax_many(Tensor[] xs) -> Tensor");
  m.def("float8_scale(Tensor amax, ScalarType dtype, bool power_of_two) -> Tensor");
  // scale: [], or one per row of the result [N, K] ([K, N] if transposed).
  m.def("float8_cast(Tensor x, Tensor scale, ScalarType dtype, bool transposed) -> Tensor");
  // x [N, K] -> data [N, K'], exponents [N, K' / 32], K' whole blocks; transposed [K, N'].
  m.def("float8_cast_blocks(Tensor x, ScalarType dtype, bool round_up, bool transposed) -> (Tensor, Tensor)");
  // All tensors are [], fp32. pending = max(pending, amax) if `records`.
  m.def(
      "float8_delayed_scale(Tensor amax, Tensor(a!) pending, Tensor largest, ScalarType dtype, bool "
      "power_of_two, bool records) -> Tensor");
}
TORCH_LIBRARY_IMPL(titan, CompositeExplicitAutograd, m) {
  m.impl("float8_amax", composite::amax);
  m.impl("float8_amax_many", composite::amax_many);
  m.impl("float8_scale", composite::scale_of);
  m.impl("float8_cast", composite::cast);
  m.impl("float8_cast_blocks", composite::cast_blocks);
  m.impl("float8_delayed_scale", composite::delayed_scale);
}
TORCH_LIBRARY_IMPL(titan, Meta, m) {
  using In = const at::Tensor&;
  m.impl("float8_amax", [](In x, std::optional<int64_t> dim) {
    const auto options = x.options().dtype(at::kFloat);
    return dim ? at::empty({x.size(1 - *dim), 1}, options) : at::empty({}, options);
  });
  m.impl("float8_amax_many", [](at::TensorList xs) {
    return at::empty({static_cast<int64_t>(xs.size())}, xs[0].options().dtype(at::kFloat));
  });
  m.impl("float8_scale",
         [](In amax, at::ScalarType, bool) { return at::empty(amax.sizes(), amax.options()); });
  m.impl("float8_cast", [](In x, In, at::ScalarType dtype, bool transposed) {
    const auto options = x.options().dtype(dtype);
    return transposed ? at::empty({x.size(1), x.size(0)}, options) : at::empty(x.sizes(), options);
  });
  m.impl("float8_cast_blocks", [](In x, at::ScalarType dtype, bool, bool transposed) -> DataAndScale {
    const int64_t vectors = x.size(transposed ? 1 : 0), elements = x.size(transposed ? 0 : 1);
    const int64_t blocks = (elements + kBlock - 1) / kBlock;
    return {at::empty({vectors, blocks * kBlock}, x.options().dtype(dtype)),
            at::empty({vectors, blocks}, x.options().dtype(at::kFloat8_e8m0fnu))};
  });
  m.impl("float8_delayed_scale",
         [](In amax, In, In, at::ScalarType, bool, bool) { return at::empty({}, amax.options()); });
}

void check_matrix(const at::Tensor& x) {
  TITAN_CHECK(x.dim() == 2 && x.numel() > 0, "float8: expected a nonempty matrix, got ", x.sizes());
}

}  // namespace

// ---- calls

double largest_value(at::ScalarType dtype) {
  TITAN_CHECK(dtype == at::kFloat8_e4m3fn || dtype == at::kFloat8_e5m2,
              "float8: expected Float8_e4m3fn or Float8_e5m2, got ", dtype);
  return dtype == at::kFloat8_e4m3fn ? 448.0 : 57344.0;
}

at::Tensor amax(const at::Tensor& x, Over over) {
  check_matrix(x);
  static const auto operation = ops::find_operator<decltype(composite::amax)>("titan::float8_amax");
  const std::optional<int64_t> dim = over == Over::Row ? std::optional<int64_t>(1) : 0;
  return operation.call(x, over == Over::Matrix ? std::nullopt : dim);
}

at::Tensor amax_many(at::TensorList xs) {
  TITAN_CHECK(!xs.empty(), "float8: amax_many() of no tensors");
  for (const at::Tensor& x : xs)
    TITAN_CHECK(x.numel() > 0, "float8: amax_many() of an empty tensor ", x.sizes());
  static const auto operation = ops::find_operator<decltype(composite::amax_many)>("titan::float8_amax_many");
  return operation.call(xs);
}

at::Tensor scale_of(const at::Tensor& amax, at::ScalarType dtype, bool power_of_two) {
  static const auto operation = ops::find_operator<decltype(composite::scale_of)>("titan::float8_scale");
  return operation.call(amax, dtype, power_of_two);
}

at::Tensor cast(const at::Tensor& x, const at::Tensor& scale, at::ScalarType dtype, bool transposed) {
  largest_value(dtype);  // throws for another dtype
  static const auto operation = ops::find_operator<decltype(composite::cast)>("titan::float8_cast");
  const int64_t rows = transposed ? x.size(1) : x.size(0);
  TITAN_CHECK(
      x.dim() == 2 && scale.scalar_type() == at::kFloat && (scale.numel() == 1 || scale.numel() == rows),
      "float8: ", scale.scalar_type(), " scales ", scale.sizes(), " for ", x.sizes(),
      transposed ? " transposed" : "", "; expected fp32, one scale or one per row of the result");
  return operation.call(x, scale, dtype, transposed);
}

ops::ScaledMatrix cast_blocks(const at::Tensor& x, const BlockCast& options) {
  largest_value(options.dtype);  // throws for another dtype
  check_matrix(x);
  const bool round_up = options.rounding == BlockRounding::Up;
  static const auto operation =
      ops::find_operator<decltype(composite::cast_blocks)>("titan::float8_cast_blocks");
  auto [data, scale] = options.composed && !x.is_meta()
                           ? composite::cast_blocks(x, options.dtype, round_up, options.transposed)
                           : operation.call(x, options.dtype, round_up, options.transposed);
  return {std::move(data), std::move(scale)};
}

at::Tensor delayed_scale(const at::Tensor& amax, const DelayedScale& history, at::ScalarType dtype,
                         bool power_of_two, bool records) {
  static const auto operation =
      ops::find_operator<decltype(composite::delayed_scale)>("titan::float8_delayed_scale");
  return operation.call(amax, history.pending, history.largest, dtype, power_of_two, records);
}

// 2^(e - 127) from its bits; for e = 0 it is a denormal.
at::Tensor block_values(const ops::ScaledMatrix& matrix) {
  const at::Tensor exponents = matrix.scale.contiguous().view(at::kByte).to(at::kInt).unsqueeze(2);
  const at::Tensor bits = at::where(exponents.eq(0), 0x00400000, exponents * 0x00800000);
  const at::Tensor scale =
      bits.to(at::kInt).view(at::kFloat).masked_fill(exponents.eq(kNotFinite), std::nan(""));
  const at::Tensor blocks =
      matrix.data.to(at::kFloat).view({matrix.data.size(0), matrix.data.size(1) / kBlock, kBlock});
  return (blocks * scale).view(matrix.data.sizes());
}

}  // namespace titan::float8
