#include "float8/block_composite.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/bitwise_and.h>
#include <ATen/ops/bitwise_left_shift.h>
#include <ATen/ops/bitwise_right_shift.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/full.h>
#include <ATen/ops/where.h>

#include "float8/block_scale.h"
#include "titan/float8/cast.h"

namespace titan::float8::composite {

namespace {

at::Tensor mantissa_above(const at::Tensor& bits, int64_t bound) {
  return bits.bitwise_and(0x7fffff).gt(bound).to(at::kInt);
}

at::Tensor exponents_down(const at::Tensor& bits, at::ScalarType dtype) {
  return (at::bitwise_right_shift(bits, 23) - largest_exponent(dtype)).clamp_min(0);
}

// A division by a number would be a multiplication by its reciprocal on a GPU.
at::Tensor exponents_up(const at::Tensor& largest, at::ScalarType dtype) {
  const at::Tensor quotient = largest / at::full({}, largest_value(dtype), largest.options());
  const at::Tensor bits = quotient.view(at::kInt), exponent = at::bitwise_right_shift(bits, 23);
  return at::where(exponent.eq(0), mantissa_above(bits, 0x400000), exponent + mantissa_above(bits, 0));
}

// [Note: factors of blocks]
at::Tensor factors(const at::Tensor& exponents, bool round_up) {
  const at::Tensor bits = at::bitwise_left_shift(254 - exponents.clamp_min(1), 23);
  const at::Tensor factor = (bits.view(at::kFloat)).masked_fill(exponents.eq(kNotFinite), 0);
  return round_up ? factor.masked_fill(exponents.eq(0), 1) : factor;
}

}  // namespace

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

}  // namespace titan::float8::composite
