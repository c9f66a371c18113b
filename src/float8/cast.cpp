// The casts as operations of the dispatcher: schemas, compositions of LibTorch's operations, and shapes on
// the meta device. CPU kernels register themselves in src/float8/cpu, CUDA kernels in the plugin. None of
// these is differentiable; products are (src/ops).

#include "float8/cast.h"

#include <cmath>
#include <limits>
#include <vector>

#include <torch/library.h>

#include <ATen/TensorOperators.h>
#include <ATen/ops/_scaled_mm.h>
#include <ATen/ops/bitwise_and.h>
#include <ATen/ops/bitwise_left_shift.h>
#include <ATen/ops/bitwise_right_shift.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/ones.h>
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

std::tuple<at::Tensor, at::Tensor> scale_and_inverse_of(const at::Tensor& amax, at::ScalarType dtype,
                                                        bool power_of_two) {
  const at::Tensor scale = scale_of(amax, dtype, power_of_two);
  return {scale, scale.reciprocal()};
}

at::Tensor cast(const at::Tensor& x, const at::Tensor& scale, at::ScalarType dtype, bool transposed) {
  const double largest = largest_value(dtype);
  const at::Tensor from = transposed ? x.t() : x;
  return (from.to(at::kFloat) * scale).clamp(-largest, largest).to(dtype).contiguous();
}

std::tuple<at::Tensor, at::Tensor> cast_blocks(const at::Tensor& x, at::ScalarType dtype, bool round_up,
                                               bool transposed, bool for_hardware) {
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
  const at::Tensor scale = exponents.to(at::kByte).view(at::kFloat8_e8m0fnu);
  return {data, for_hardware ? blocked_layout(scale) : scale};
}

// A CPU has a kernel for each.
FourTensors cast_blocks_both(const at::Tensor& x, at::ScalarType dtype, bool round_up, bool for_hardware) {
  static const auto operation = ops::find_operator<decltype(cast_blocks)>("titan::float8_cast_blocks");
  return std::tuple_cat(operation.call(x, dtype, round_up, /*transposed=*/false, for_hardware),
                        operation.call(x, dtype, round_up, /*transposed=*/true, for_hardware));
}

void put_product(const at::Tensor& out, const at::Tensor& mat1, const at::Tensor& mat2,
                 const at::Tensor& scale_1, const at::Tensor& scale_2, bool fast_accumulation,
                 bool power_of_two_scales, bool adds) {
  const auto product = [&] {
    if (scale_1.scalar_type() == at::kFloat8_e8m0fnu)
      return at::_scaled_mm(mat1, mat2, scale_1, scale_2, /*bias=*/{}, /*scale_result=*/{},
                            out.scalar_type());
    if (scale_1.numel() == 1 && scale_2.numel() == 1)
      return at::_scaled_mm(mat1, mat2, scale_1.reshape({}), scale_2.reshape({}), /*bias=*/{},
                            /*scale_result=*/{}, out.scalar_type(), fast_accumulation);
    const at::Tensor of_vectors = at::empty_like(out);
    float8::multiply_vectors(of_vectors,
                             {mat1, mat2.t(), scale_1, scale_2, fast_accumulation, power_of_two_scales});
    return of_vectors;
  }();
  if (adds)
    out.add_(product);
  else
    out.copy_(product);
}

void cast_into_many(at::TensorList outs, at::TensorList xs, const at::Tensor& scales) {
  for (size_t i = 0; i < outs.size(); ++i) {
    if (outs[i].numel() == 0) continue;
    const at::Tensor scale = scales[static_cast<int64_t>(i)];
    outs[i].copy_(cast(xs[i], scale, outs[i].scalar_type(), /*transposed=*/false).view(outs[i].sizes()));
  }
}

at::Tensor magnitudes(const at::Tensor& x, bool of_columns) {
  return of_columns ? float8::amax(x, Over::Column).view({1, -1}) : float8::amax(x, Over::Matrix).view({1});
}

FourTensors cast_both(const at::Tensor& x, const std::optional<at::Tensor>& magnitudes,
                      const std::optional<at::Tensor>& scale, at::ScalarType dtype, bool power_of_two,
                      bool rows, bool columns) {
  const auto made = [&] {
    const at::Tensor amax = magnitudes->numel() == 1 ? magnitudes->reshape({}) : magnitudes->amax();
    return float8::scale_of(amax, dtype, power_of_two);
  };
  const at::Tensor new_scale = scale ? at::Tensor() : made(), &used = scale ? *scale : new_scale;
  return {rows ? float8::cast(x, used, dtype, false) : at::Tensor(),
          columns ? float8::cast(x, used, dtype, true) : at::Tensor(), new_scale, at::Tensor()};
}

FourTensors cast_rows(const at::Tensor& x, at::ScalarType dtype, bool power_of_two, bool measures_columns) {
  const at::Tensor scale = float8::scale_of(float8::amax(x, Over::Row), dtype, power_of_two);
  return {float8::cast(x, scale, dtype, false), scale, at::Tensor(),
          measures_columns ? float8::magnitudes(x, Over::Column) : at::Tensor()};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> cast_columns(const at::Tensor& x, const at::Tensor& magnitudes,
                                                            at::ScalarType dtype, bool power_of_two) {
  const at::Tensor amax = magnitudes.size(0) == 1 ? magnitudes[0] : magnitudes.amax({0});
  const at::Tensor scale = float8::scale_of(amax.to(at::kFloat).unsqueeze(1), dtype, power_of_two);
  return {float8::cast(x, scale, dtype, true), scale, at::Tensor()};
}

// The kernel with a scale per row returns only 16 bits, and is slow without fast accumulation. The kernel for
// whole matrices returns the sums, which are scaled afterwards. Rounding to bf16 and scaling by a power of two
// commute (except for denormals), so these sums can be bf16, which takes half the memory.
void multiply_vectors(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
                      const at::Tensor& inverse_a, const at::Tensor& inverse_b, bool fast_accumulation,
                      bool power_of_two_scales) {
  const auto per_vector = [](const at::Tensor& inverse, const at::Tensor& data) {
    return inverse.numel() > 1 ? inverse : inverse.expand({data.size(0), 1}).contiguous();
  };
  if (fast_accumulation && out.scalar_type() == at::kBFloat16) {
    at::Tensor result = out;
    at::_scaled_mm_out(result, a, b.t(), per_vector(inverse_a, a), per_vector(inverse_b, b).t(), /*bias=*/{},
                       /*scale_result=*/{}, out.scalar_type(), fast_accumulation);
    return;
  }
  const bool in_place =
      out.scalar_type() == at::kFloat || (power_of_two_scales && out.scalar_type() == at::kBFloat16);
  at::Tensor sums = in_place ? out : at::empty(out.sizes(), out.options().dtype(at::kFloat));
  const at::Tensor one = at::ones({}, inverse_a.options());
  at::_scaled_mm_out(sums, a, b.t(), one, one, /*bias=*/{}, /*scale_result=*/{}, sums.scalar_type(),
                     fast_accumulation);
  sums.mul_(inverse_a).mul_(inverse_b.numel() > 1 ? inverse_b.t() : inverse_b);
  if (!in_place) out.copy_(sums);
}

at::Tensor delayed_scale(const at::Tensor& magnitudes, const at::Tensor& pending, const at::Tensor& largest,
                         at::ScalarType dtype, bool power_of_two, bool records) {
  const at::Tensor amax = magnitudes.dim() == 0 ? magnitudes : magnitudes.amax();
  const at::Tensor finite = at::isfinite(amax);
  if (records) pending.copy_(at::maximum(pending, at::where(finite, amax, 0.0)));
  const at::Tensor scale = scale_of(at::where(largest.gt(0), largest, amax), dtype, power_of_two);
  return at::where(finite, scale, std::numeric_limits<double>::quiet_NaN());
}

FourTensors cast_delayed(const at::Tensor& x, const at::Tensor& pending, const at::Tensor& largest,
                         at::ScalarType dtype, bool power_of_two, bool records, bool rows, bool columns) {
  const at::Tensor amax = float8::amax(x, Over::Matrix);
  const at::Tensor scale =
      float8::delayed_scale(amax, {.largest = largest, .pending = pending}, dtype, power_of_two, records);
  const at::Tensor of_history = float8::scale_of(largest, dtype, power_of_two);
  const at::Tensor used = at::where(largest.gt(0), of_history, scale);
  return {rows ? float8::cast(x, used, dtype, false) : at::Tensor(),
          columns ? float8::cast(x, used, dtype, true) : at::Tensor(), scale, at::Tensor()};
}

ThreeLists cast_many(at::TensorList xs, at::TensorList scales, at::ScalarType dtype, bool power_of_two,
                     bool by_vector, bool transposed) {
  ThreeLists results;
  auto& [data, made, inverses] = results;
  const Over over = !by_vector ? Over::Matrix : transposed ? Over::Column : Over::Row;
  for (size_t i = 0; i < xs.size(); ++i) {
    if (scales.empty()) {
      made.push_back(float8::scale_of(float8::amax(xs[i], over), dtype, power_of_two));
      inverses.push_back(made.back().reciprocal());
    }
    data.push_back(float8::cast(xs[i], scales.empty() ? made.back() : scales[i], dtype, transposed));
  }
  return results;
}

std::vector<at::Tensor> transpose_many(at::TensorList xs) {
  std::vector<at::Tensor> results;
  for (const at::Tensor& x : xs) results.push_back(x.t().contiguous());
  return results;
}

void update_histories(const at::Tensor& history, const at::Tensor& pending, const at::Tensor& largest) {
  const int64_t kept = history.size(1) - 1;
  if (kept > 0) history.narrow(1, 1, kept).copy_(history.narrow(1, 0, kept).clone());
  history.select(1, 0).copy_(pending);
  largest.copy_(history.amax(1));
  pending.zero_();
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
  m.def("float8_scale(Tensor amax, ScalarType dtype, bool power_of_two) -> (Tensor scale, Tensor inverse)");
  // scale: [], or one per row of the result [N, K] ([K, N] if transposed).
  m.def("float8_cast(Tensor x, Tensor scale, ScalarType dtype, bool transposed) -> Tensor");
  // x [N, K] -> data [N, K'], exponents [N, K' / 32], K' whole blocks; transposed [K, N'].
  // With for_hardware the exponents are in blocked_layout().
  m.def(
      "float8_cast_blocks(Tensor x, ScalarType dtype, bool round_up, bool transposed, bool for_hardware) -> "
      "(Tensor, Tensor)");
  // -> data, exponents; those of the transposed
  m.def(
      "float8_cast_blocks_both(Tensor x, ScalarType dtype, bool round_up, bool for_hardware) -> (Tensor, "
      "Tensor, Tensor, Tensor)");
  // amax: [], or [n] for parts. The others are [], fp32. pending = max(pending, amax) if `records`.
  m.def(
      "float8_delayed_scale(Tensor amax, Tensor(a!) pending, Tensor largest, ScalarType dtype, bool "
      "power_of_two, bool records) -> Tensor");
  // See cast.h. A result that isn't asked for, or not computed, is undefined.
  m.def("float8_cast_into_many(Tensor(a!)[] outs, Tensor[] xs, Tensor scales) -> ()");
  m.def("float8_magnitudes(Tensor x, bool of_columns) -> Tensor");
  // -> along rows, down columns, scale, inverse. One of magnitudes and scale is given.
  m.def(
      "float8_cast_both(Tensor x, Tensor? magnitudes, Tensor? scale, ScalarType dtype, bool power_of_two, "
      "bool rows, bool columns) -> (Tensor, Tensor, Tensor, Tensor)");
  // -> as float8_cast_both
  m.def(
      "float8_cast_delayed(Tensor x, Tensor(a!) pending, Tensor largest, ScalarType dtype, bool "
      "power_of_two, "
      "bool records, bool rows, bool columns) -> (Tensor, Tensor, Tensor, Tensor)");
  // -> data; without scales, also those that were made, and their inverses
  m.def(
      "float8_cast_many(Tensor[] xs, Tensor[] scales, ScalarType dtype, bool power_of_two, bool by_vector, "
      "bool transposed) -> (Tensor[], Tensor[], Tensor[])");
  m.def("float8_transpose_many(Tensor[] xs) -> Tensor[]");
  m.def("float8_update_histories(Tensor(a!) history, Tensor(b!) pending, Tensor(c!) largest) -> ()");
  // -> data, scale, inverse, magnitudes of columns
  m.def(
      "float8_cast_rows(Tensor x, ScalarType dtype, bool power_of_two, bool measures_columns) -> "
      "(Tensor, Tensor, Tensor, Tensor)");
  // -> data, scale, inverse
  m.def(
      "float8_cast_columns(Tensor x, Tensor magnitudes, ScalarType dtype, bool power_of_two) -> "
      "(Tensor, Tensor, Tensor)");
  m.def(
      "float8_put_product(Tensor(a!) out, Tensor mat1, Tensor mat2, Tensor scale_1, Tensor scale_2, bool "
      "fast_accumulation, bool power_of_two_scales, bool adds) -> ()");
  m.def(
      "float8_multiply_vectors(Tensor(a!) out, Tensor a, Tensor b, Tensor inverse_a, Tensor inverse_b, bool "
      "fast_accumulation, bool power_of_two_scales) -> ()");
}
TORCH_LIBRARY_IMPL(titan, CompositeExplicitAutograd, m) {
  m.impl("float8_amax", composite::amax);
  m.impl("float8_amax_many", composite::amax_many);
  m.impl("float8_scale", composite::scale_and_inverse_of);
  m.impl("float8_cast", composite::cast);
  m.impl("float8_cast_blocks", composite::cast_blocks);
  m.impl("float8_cast_blocks_both", composite::cast_blocks_both);
  m.impl("float8_put_product", composite::put_product);
  m.impl("float8_delayed_scale", composite::delayed_scale);
  m.impl("float8_cast_into_many", composite::cast_into_many);
  m.impl("float8_magnitudes", composite::magnitudes);
  m.impl("float8_cast_both", composite::cast_both);
  m.impl("float8_cast_delayed", composite::cast_delayed);
  m.impl("float8_cast_many", composite::cast_many);
  m.impl("float8_transpose_many", composite::transpose_many);
  m.impl("float8_update_histories", composite::update_histories);
  m.impl("float8_cast_rows", composite::cast_rows);
  m.impl("float8_cast_columns", composite::cast_columns);
  m.impl("float8_multiply_vectors", composite::multiply_vectors);
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
  m.impl("float8_scale", [](In amax, at::ScalarType, bool) {
    return std::tuple(at::empty(amax.sizes(), amax.options()), at::empty(amax.sizes(), amax.options()));
  });
  m.impl("float8_cast", [](In x, In, at::ScalarType dtype, bool transposed) {
    const auto options = x.options().dtype(dtype);
    return transposed ? at::empty({x.size(1), x.size(0)}, options) : at::empty(x.sizes(), options);
  });
  static const auto new_blocks = [](In x, at::ScalarType dtype, bool, bool transposed,
                                    bool for_hardware) -> DataAndScale {
    const int64_t vectors = x.size(transposed ? 1 : 0), elements = x.size(transposed ? 0 : 1);
    const int64_t blocks = (elements + kBlock - 1) / kBlock;
    const auto exponents = x.options().dtype(at::kFloat8_e8m0fnu);
    return {at::empty({vectors, blocks * kBlock}, x.options().dtype(dtype)),
            for_hardware ? at::empty({size_of_blocked_layout(vectors, blocks)}, exponents)
                         : at::empty({vectors, blocks}, exponents)};
  };
  m.impl("float8_cast_blocks", new_blocks);
  m.impl("float8_cast_blocks_both",
         [](In x, at::ScalarType dtype, bool up, bool for_hardware) -> composite::FourTensors {
           return std::tuple_cat(new_blocks(x, dtype, up, /*transposed=*/false, for_hardware),
                                 new_blocks(x, dtype, up, /*transposed=*/true, for_hardware));
         });
  m.impl("float8_delayed_scale",
         [](In amax, In, In, at::ScalarType, bool, bool) { return at::empty({}, amax.options()); });
  m.impl(
      "float8_cast_delayed",
      [](In x, In, In, at::ScalarType dtype, bool, bool, bool rows, bool columns) -> composite::FourTensors {
        const auto data = x.options().dtype(dtype);
        return {rows ? at::empty(x.sizes(), data) : at::Tensor(),
                columns ? at::empty({x.size(1), x.size(0)}, data) : at::Tensor(),
                at::empty({}, x.options().dtype(at::kFloat)), at::Tensor()};
      });
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
  return scale_and_inverse_of(amax, dtype, power_of_two).scale;
}

ops::ScaledMatrix scale_and_inverse_of(const at::Tensor& amax, at::ScalarType dtype, bool power_of_two) {
  static const auto operation =
      ops::find_operator<decltype(composite::scale_and_inverse_of)>("titan::float8_scale");
  const auto [scale, inverse] = operation.call(amax, dtype, power_of_two);
  return {.scale = scale, .inverse = inverse};
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

void cast_into_many(at::TensorList outs, at::TensorList xs, const at::Tensor& scales) {
  TITAN_CHECK(outs.size() == xs.size() && scales.numel() == static_cast<int64_t>(xs.size()),
              "float8: cast_into_many() of ", xs.size(), " matrices with ", scales.numel(), " scales into ",
              outs.size());
  for (size_t i = 0; i < outs.size(); ++i) {
    TITAN_CHECK(outs[i].is_contiguous() && outs[i].numel() == xs[i].numel(), "float8: cast_into_many() of ",
                xs[i].sizes(), " into ", outs[i].sizes());
    largest_value(outs[i].scalar_type());  // throws for another dtype
  }
  static const auto operation =
      ops::find_operator<decltype(composite::cast_into_many)>("titan::float8_cast_into_many");
  operation.call(outs, xs, scales);
}

at::Tensor magnitudes(const at::Tensor& x, Over over) {
  check_matrix(x);
  TITAN_INTERNAL_ASSERT(over != Over::Row, "rows aren't measured in parts");
  static const auto operation =
      ops::find_operator<decltype(composite::magnitudes)>("titan::float8_magnitudes");
  return operation.call(x, over == Over::Column);
}

namespace {

BothCasts both_of(const composite::FourTensors& results, const at::Tensor& scale, bool rows, bool columns) {
  const auto& [along_rows, down_columns, made, inverse] = results;
  BothCasts both;
  if (rows || !columns) both.along_rows = {along_rows, scale, inverse};  // or the scale alone
  if (columns) both.down_columns = {down_columns, scale, inverse};
  return both;
}

BothCasts cast_both(const at::Tensor& x, const std::optional<at::Tensor>& magnitudes,
                    const std::optional<at::Tensor>& scale, const ScaleForm& form, bool rows, bool columns) {
  check_matrix(x);
  largest_value(form.dtype);  // throws for another dtype
  static const auto operation = ops::find_operator<decltype(composite::cast_both)>("titan::float8_cast_both");
  const auto results = operation.call(x, magnitudes, scale, form.dtype, form.power_of_two, rows, columns);
  return both_of(results, scale ? *scale : std::get<2>(results), rows, columns);
}

}  // namespace

BothCasts cast_measured(const at::Tensor& x, const at::Tensor& magnitudes, const ScaleForm& form, bool rows,
                        bool columns) {
  return cast_both(x, magnitudes, std::nullopt, form, rows, columns);
}

BothCasts cast_scaled(const at::Tensor& x, const at::Tensor& scale, at::ScalarType dtype, bool rows,
                      bool columns) {
  return cast_both(x, std::nullopt, scale, {.dtype = dtype}, rows, columns);
}

BothCasts cast_delayed(const at::Tensor& x, const DelayedScale& history, const ScaleForm& form, bool records,
                       bool rows, bool columns) {
  check_matrix(x);
  largest_value(form.dtype);  // throws for another dtype
  static const auto operation =
      ops::find_operator<decltype(composite::cast_delayed)>("titan::float8_cast_delayed");
  const auto results = operation.call(x, history.pending, history.largest, form.dtype, form.power_of_two,
                                      records, rows, columns);
  return both_of(results, std::get<2>(results), rows, columns);
}

std::vector<ops::ScaledMatrix> cast_many(at::TensorList xs, const std::vector<ops::ScaledMatrix>& scales,
                                         const ManyCasts& how) {
  for (const at::Tensor& x : xs) check_matrix(x);
  largest_value(how.form.dtype);  // throws for another dtype
  static const auto operation = ops::find_operator<decltype(composite::cast_many)>("titan::float8_cast_many");
  std::vector<at::Tensor> given;
  for (const ops::ScaledMatrix& each : scales) given.push_back(each.scale);
  const auto [data, made, inverses] =
      operation.call(xs, given, how.form.dtype, how.form.power_of_two, how.by_vector, how.transposed);
  std::vector<ops::ScaledMatrix> casts = scales;
  casts.resize(xs.size());
  for (size_t i = 0; i < xs.size(); ++i) {
    if (scales.empty()) casts[i] = {.data = {}, .scale = made[i], .inverse = inverses[i]};
    casts[i].data = data[i];
  }
  return casts;
}

std::vector<at::Tensor> transpose_many(at::TensorList xs) {
  for (const at::Tensor& x : xs)
    TITAN_CHECK(x.dim() == 2 && x.element_size() == 1, "float8: transpose_many() of ", x.scalar_type(), " ",
                x.sizes());
  static const auto operation =
      ops::find_operator<decltype(composite::transpose_many)>("titan::float8_transpose_many");
  return operation.call(xs);
}

void update_histories(const at::Tensor& history, const at::Tensor& pending, const at::Tensor& largest) {
  static const auto operation =
      ops::find_operator<decltype(composite::update_histories)>("titan::float8_update_histories");
  operation.call(history, pending, largest);
}

MeasuredRows cast_rows(const at::Tensor& x, const ScaleForm& form, bool measures_columns) {
  check_matrix(x);
  static const auto operation = ops::find_operator<decltype(composite::cast_rows)>("titan::float8_cast_rows");
  auto [data, scale, inverse, magnitudes] =
      operation.call(x, form.dtype, form.power_of_two, measures_columns);
  return {{std::move(data), std::move(scale), std::move(inverse)}, std::move(magnitudes)};
}

ops::ScaledMatrix cast_columns(const at::Tensor& x, const at::Tensor& magnitudes, const ScaleForm& form) {
  check_matrix(x);
  static const auto operation =
      ops::find_operator<decltype(composite::cast_columns)>("titan::float8_cast_columns");
  auto [data, scale, inverse] = operation.call(x, magnitudes, form.dtype, form.power_of_two);
  return {std::move(data), std::move(scale), std::move(inverse)};
}

void put_product(const at::Tensor& out_NM, const VectorProduct& product, bool adds) {
  static const auto operation =
      ops::find_operator<decltype(composite::put_product)>("titan::float8_put_product");
  operation.call(out_NM, product.a_NK, product.b_MK.t(), product.inverse_a, product.inverse_b,
                 product.fast_accumulation, product.power_of_two_scales, adds);
}

void multiply_vectors(const at::Tensor& out_NM, const VectorProduct& product) {
  static const auto operation =
      ops::find_operator<decltype(composite::multiply_vectors)>("titan::float8_multiply_vectors");
  operation.call(out_NM, product.a_NK, product.b_MK, product.inverse_a, product.inverse_b,
                 product.fast_accumulation, product.power_of_two_scales);
}

ops::ScaledMatrix cast_blocks(const at::Tensor& x, const BlockCast& options) {
  largest_value(options.dtype);  // throws for another dtype
  check_matrix(x);
  const bool round_up = options.rounding == BlockRounding::Up;
  static const auto operation =
      ops::find_operator<decltype(composite::cast_blocks)>("titan::float8_cast_blocks");
  auto [data, scale] =
      options.composed && !x.is_meta()
          ? composite::cast_blocks(x, options.dtype, round_up, options.transposed, options.for_hardware)
          : operation.call(x, options.dtype, round_up, options.transposed, options.for_hardware);
  return {std::move(data), std::move(scale)};
}

BothCasts cast_blocks_both(const at::Tensor& x, const BlockCast& options) {
  largest_value(options.dtype);
  check_matrix(x);
  TITAN_INTERNAL_ASSERT(!options.transposed && !options.composed);
  static const auto operation =
      ops::find_operator<decltype(composite::cast_blocks_both)>("titan::float8_cast_blocks_both");
  auto [rows, row_scale, columns, column_scale] =
      operation.call(x, options.dtype, options.rounding == BlockRounding::Up, options.for_hardware);
  return {.along_rows = {std::move(rows), std::move(row_scale)},
          .down_columns = {std::move(columns), std::move(column_scale)}};
}

at::Tensor delayed_scale(const at::Tensor& amax, const DelayedScale& history, at::ScalarType dtype,
                         bool power_of_two, bool records) {
  static const auto operation =
      ops::find_operator<decltype(composite::delayed_scale)>("titan::float8_delayed_scale");
  return operation.call(amax, history.pending, history.largest, dtype, power_of_two, records);
}

// Within a tile, vector v is at 16 (v mod 32) + 4 (v / 32): four groups of 32 side by side.
at::Tensor blocked_layout(const at::Tensor& scale) {
  const auto missing_to = [](int64_t size, int64_t multiple) {
    return (multiple - size % multiple) % multiple;
  };
  at::Tensor bytes = scale.contiguous().view(at::kByte);
  bytes = at::constant_pad_nd(bytes, {0, missing_to(scale.size(1), 4), 0, missing_to(scale.size(0), 128)});
  const int64_t rows = bytes.size(0) / 128, columns = bytes.size(1) / 4;
  return bytes.view({rows, 4, 32, columns, 4})
      .permute({0, 3, 2, 1, 4})
      .contiguous()
      .view({-1})
      .view(at::kFloat8_e8m0fnu);
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
