#include "titan/float8/block_cast.h"

#include <torch/library.h>

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/where.h>

#include "float8/block_composite.h"
#include "float8/block_scale.h"
#include "ops/operators.h"
#include "titan/core/error.h"
#include "titan/float8/cast.h"

namespace titan::float8 {

namespace {

using DataAndScale = std::tuple<at::Tensor, at::Tensor>;

DataAndScale cast_blocks_meta(const at::Tensor& x, at::ScalarType dtype, bool /*round_up*/, bool transposed) {
  const int64_t vectors = x.size(transposed ? 1 : 0), elements = x.size(transposed ? 0 : 1);
  const int64_t blocks = (elements + kBlock - 1) / kBlock;
  return {at::empty({vectors, blocks * kBlock}, x.options().dtype(dtype)),
          at::empty({vectors, blocks}, x.options().dtype(at::kFloat8_e8m0fnu))};
}

TORCH_LIBRARY_FRAGMENT(titan, m) {
  // x [N, K] -> data [N, K'], exponents [N, K' / 32], K' whole blocks; of columns [K, N'].
  m.def("float8_cast_blocks(Tensor x, ScalarType dtype, bool round_up, bool transposed) -> (Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(titan, CompositeExplicitAutograd, m) {
  m.impl("float8_cast_blocks", composite::cast_blocks);
}
TORCH_LIBRARY_IMPL(titan, Meta, m) { m.impl("float8_cast_blocks", cast_blocks_meta); }

}  // namespace

ops::ScaledMatrix cast_blocks(const at::Tensor& x, const BlockCast& options) {
  largest_value(options.dtype);  // throws where it isn't one of ours
  TITAN_CHECK(x.dim() == 2 && x.numel() > 0, "float8: blocks of ", x.sizes(),
              "; expected a matrix that isn't empty");
  const bool round_up = options.rounding == BlockRounding::Up;
  using Signature = DataAndScale(const at::Tensor&, at::ScalarType, bool, bool);
  static const auto operation = ops::find_operator<Signature>("titan::float8_cast_blocks");
  auto [data, scale] = options.composed && !x.is_meta()
                           ? composite::cast_blocks(x, options.dtype, round_up, options.transposed)
                           : operation.call(x, options.dtype, round_up, options.transposed);
  return {std::move(data), std::move(scale)};
}

// 2^(e - 127) by its bits; of 0 that is a denormal.
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
