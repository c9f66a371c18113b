#include "float8/block_product.h"

#include <ATen/ops/_scaled_mm.h>
#include <ATen/ops/constant_pad_nd.h>

#include "titan/float8/block_cast.h"

namespace titan::float8 {

namespace {

int64_t missing_to(int64_t size, int64_t multiple) { return (multiple - size % multiple) % multiple; }

}  // namespace

// Within a tile vector v lies at 16 (v mod 32) + 4 (v / 32): four groups of 32 side by side.
at::Tensor blocked_layout(const at::Tensor& scale) {
  at::Tensor bytes = scale.contiguous().view(at::kByte);
  bytes = at::constant_pad_nd(bytes, {0, missing_to(scale.size(1), 4), 0, missing_to(scale.size(0), 128)});
  const int64_t rows = bytes.size(0) / 128, columns = bytes.size(1) / 4;
  return bytes.view({rows, 4, 32, columns, 4})
      .permute({0, 3, 2, 1, 4})
      .contiguous()
      .view({-1})
      .view(at::kFloat8_e8m0fnu);
}

// The library's product gives bf16, fp16 or fp32.
at::Tensor hardware_block_product(const ops::ScaledMatrix& a_NK, const ops::ScaledMatrix& b_MK,
                                  const ScaledProductOptions& options) {
  return at::_scaled_mm(a_NK.data, b_MK.data.t(), blocked_layout(a_NK.scale), blocked_layout(b_MK.scale),
                        /*bias=*/{}, /*scale_result=*/{}, options.out_dtype);
}

}  // namespace titan::float8
