#include "float8/scaled_product.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_scaled_mm.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/ones.h>

#include "float8/cast.h"

namespace titan::float8 {

// Within a tile, vector v lies at 16 (v mod 32) + 4 (v / 32): four groups of 32 side by side.
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

namespace {

constexpr int64_t kAlignment = 16;  // of the summed dimension, in elements

bool by_vector(const ops::ScaledMatrix& matrix) { return matrix.scale.numel() > 1; }

// Contiguous rows of a length that the hardware takes. A zero adds nothing to a sum.
at::Tensor aligned(const at::Tensor& data) {
  const int64_t rest = data.size(1) % kAlignment;
  if (rest == 0) return data.contiguous();
  const at::Tensor bytes = at::constant_pad_nd(data.view(at::kByte), {0, kAlignment - rest});
  return bytes.view(data.scalar_type());
}

// [vectors, 1], from either kind of scale.
at::Tensor per_vector(const ops::ScaledMatrix& matrix) {
  const at::Tensor inverse = matrix.scale.reciprocal();
  return by_vector(matrix) ? inverse : inverse.expand({matrix.data.size(0), 1}).contiguous();
}

}  // namespace

at::Tensor hardware_product(const ops::ScaledMatrix& a_NK, const ops::ScaledMatrix& b_MK,
                            const ScaledProductOptions& options) {
  if (in_blocks(a_NK))
    return at::_scaled_mm(a_NK.data, b_MK.data.t(), blocked_layout(a_NK.scale), blocked_layout(b_MK.scale),
                          /*bias=*/{}, /*scale_result=*/{}, options.out_dtype);
  const at::Tensor a = aligned(a_NK.data), b = aligned(b_MK.data);
  const auto multiply = [&](const at::Tensor& scale_a, const at::Tensor& scale_b, at::ScalarType dtype) {
    return at::_scaled_mm(a, b.t(), scale_a, scale_b, /*bias=*/{}, /*scale_result=*/{}, dtype,
                          options.fast_accumulation);
  };
  if (!by_vector(a_NK) && !by_vector(b_MK))
    return multiply(a_NK.scale.reciprocal().reshape({}), b_MK.scale.reciprocal().reshape({}),
                    options.out_dtype);
  const at::Tensor scale_a = per_vector(a_NK), scale_b = per_vector(b_MK).t();
  // The kernel with a scale for each row returns only bf16, and is slow unless it accumulates fast. The kernel
  // for whole matrices returns the sums in fp32, to be scaled afterwards.
  if (options.fast_accumulation && options.out_dtype == at::kBFloat16)
    return multiply(scale_a, scale_b, options.out_dtype);
  // Rounding to bf16 and scaling by a power of two commute (except for denormals): then the sums are half as
  // wide.
  const bool rounded_first = options.power_of_two_scales && options.out_dtype == at::kBFloat16;
  const at::Tensor one = at::ones({}, scale_a.options());
  return multiply(one, one, rounded_first ? at::kBFloat16 : at::kFloat)
      .mul_(scale_a)
      .mul_(scale_b)
      .to(options.out_dtype);
}

// Scales before multiplying, as torchao does, so that nothing overflows fp32 unless the result does.
at::Tensor emulated_product(const ops::Products& plain, const ops::ScaledMatrix& a_NK,
                            const ops::ScaledMatrix& b_MK, const ScaledProductOptions& options) {
  const auto values = [](const ops::ScaledMatrix& matrix) {
    return in_blocks(matrix) ? block_values(matrix) : matrix.data.to(at::kFloat).div_(matrix.scale);
  };
  return plain.forward(values(a_NK), values(b_MK)).to(options.out_dtype);
}

}  // namespace titan::float8
