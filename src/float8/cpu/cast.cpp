#include <algorithm>

#include <torch/library.h>

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include "float8/composite.h"
#include "float8/cpu/tiles.h"
#include "ops/cpu/dtype.h"

namespace titan::float8 {

namespace {

using cpu::E4m3;
using cpu::E5m2;
using cpu::kTile;
using simd_words = cpu::Words;
namespace simd = ops::simd;

constexpr int64_t kLanes = simd::kWidth<float>;

// `count` elements under one scale.
template <class Format, class T>
TITAN_CPU_CLONES void cast_run(uint8_t* out, const T* x, float scale, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    cpu::store_bytes(out + i, cpu::to_float8<Format>(simd::load(x + i) * scale));
  if (i == count) return;
  const simd_words rest = cpu::to_float8<Format>(simd::load_up_to(x + i, count - i) * scale);
  for (int64_t lane = 0; i + lane < count; ++lane) out[i + lane] = static_cast<uint8_t>(rest[lane]);
}

struct Matrix {
  int64_t rows, columns;
};

// Columns [first, first + count) of x become rows of `out` [columns, rows].
template <class Format, class T>
TITAN_CPU_CLONES void cast_turned(uint8_t* out, const T* x, const float* scales, int64_t scale_step,
                                  Matrix size, int64_t first, int64_t count) {
  alignas(64) uint8_t tile[kTile * kTile] = {};
  alignas(64) uint8_t turned[kTile * kTile];
  for (int64_t row = 0; row < size.rows; row += kTile) {
    const int64_t height = std::min(kTile, size.rows - row);
    for (int64_t i = 0; i < height; ++i)
      cpu::cast_tile_row<Format>(tile + i * kTile, x + (row + i) * size.columns + first,
                                 scales + scale_step * first, scale_step, count);
    cpu::turn_tile(turned, tile);
    for (int64_t column = 0; column < count; ++column) {
      uint8_t* to = out + (first + column) * size.rows + row;
      if (height == kTile) {
        std::memcpy(to, turned + column * kTile, kTile);
      } else {
        std::memcpy(to, turned + column * kTile, static_cast<size_t>(height));
      }
    }
  }
}

template <class Format, class T>
void cast_matrix(uint8_t* out, const T* x, const at::Tensor& scale, Matrix size, bool transposed) {
  const float* scales = scale.const_data_ptr<float>();
  const int64_t scale_step = scale.numel() > 1 ? 1 : 0;
  constexpr int64_t kRun = 32768;  // elements worth a thread
  if (!transposed && scale_step == 0)
    return at::parallel_for(0, size.rows * size.columns, kRun, [&](int64_t begin, int64_t end) {
      cast_run<Format>(out + begin, x + begin, scales[0], end - begin);
    });
  if (!transposed) {
    const int64_t grain = std::max<int64_t>(1, kRun / std::max<int64_t>(size.columns, 1));
    return at::parallel_for(0, size.rows, grain, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        cast_run<Format>(out + row * size.columns, x + row * size.columns, scales[row], size.columns);
    });
  }
  const int64_t tiles = (size.columns + kTile - 1) / kTile;
  at::parallel_for(0, tiles, std::max<int64_t>(1, 1024 / std::max<int64_t>(size.rows, 1)),
                   [&](int64_t begin, int64_t end) {
                     for (int64_t tile = begin; tile < end; ++tile)
                       cast_turned<Format>(out, x, scales, scale_step, size, tile * kTile,
                                           std::min(kTile, size.columns - tile * kTile));
                   });
}

at::Tensor cast_cpu(const at::Tensor& x, const at::Tensor& scale, at::ScalarType dtype, bool transposed) {
  const bool known = x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16;
  if (!known || !x.is_contiguous()) return composite::cast(x, scale, dtype, transposed);
  const Matrix size{x.size(0), x.size(1)};
  const at::Tensor scales = scale.contiguous();
  at::Tensor out = transposed ? at::empty({size.columns, size.rows}, x.options().dtype(dtype))
                              : at::empty(x.sizes(), x.options().dtype(dtype));
  auto* to = static_cast<uint8_t*>(out.mutable_data_ptr());
  const auto run = [&]<class T>(const T* from) {
    if (dtype == at::kFloat8_e4m3fn) {
      cast_matrix<E4m3>(to, from, scales, size, transposed);
    } else {
      cast_matrix<E5m2>(to, from, scales, size, transposed);
    }
  };
  if (x.scalar_type() == at::kFloat) {
    run(x.const_data_ptr<float>());
  } else {
    run(x.const_data_ptr<c10::BFloat16>());
  }
  return out;
}

TORCH_LIBRARY_IMPL(titan, CPU, m) { m.impl("float8_cast", cast_cpu); }

}  // namespace
}  // namespace titan::float8
