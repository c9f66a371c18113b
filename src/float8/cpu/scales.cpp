// Largest magnitudes and scales on a CPU: titan::float8_amax, float8_amax_many, float8_scale,
// float8_delayed_scale.

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "float8/cast.h"
#include "ops/cpu/simd.h"

namespace titan::float8 {
namespace {

// [Note: magnitudes as integers] Without its sign bit, a floating-point number is an integer that grows with
// its magnitude, and NaNs are above infinity. So the largest integer is the largest magnitude, or a NaN if
// there is one. One instruction compares them as signed integers.
template <class T>
using Bits = std::conditional_t<sizeof(T) == 2, int16_t, int32_t>;
template <class T>
inline constexpr Bits<T> kMagnitude = std::numeric_limits<Bits<T>>::max();
template <class T>
inline constexpr int64_t kLanes = 32 / static_cast<int64_t>(sizeof(T));
using Vector16 = int16_t __attribute__((vector_size(32)));
using Vector32 = int32_t __attribute__((vector_size(32)));
template <class T>
using BitVector = std::conditional_t<sizeof(T) == 2, Vector16, Vector32>;

template <class T>
TITAN_INLINE BitVector<T> magnitudes(const T* from) {
  BitVector<T> bits;
  std::memcpy(&bits, from, sizeof bits);
  return bits & kMagnitude<T>;
}
template <class T>
TITAN_INLINE Bits<T> magnitude(const T* from) {
  Bits<T> bits;
  std::memcpy(&bits, from, sizeof bits);
  return static_cast<Bits<T>>(bits & kMagnitude<T>);
}
template <class V>
TITAN_INLINE V larger(V a, V b) {
  return a > b ? a : b;
}

template <class T>
TITAN_CPU_CLONES Bits<T> largest_bits(const T* x, int64_t count) {
  constexpr int64_t kStep = 4 * kLanes<T>;  // independent chains, so that a comparison starts in each cycle
  BitVector<T> best[4] = {};
  int64_t i = 0;
  for (; i + kStep <= count; i += kStep)
    for (int64_t chain = 0; chain < 4; ++chain)
      best[chain] = larger(best[chain], magnitudes(x + i + chain * kLanes<T>));
  const BitVector<T> all = larger(larger(best[0], best[1]), larger(best[2], best[3]));
  Bits<T> largest = 0;
  for (int64_t lane = 0; lane < kLanes<T>; ++lane) largest = std::max<Bits<T>>(largest, all[lane]);
  for (; i < count; ++i) largest = std::max(largest, magnitude(x + i));
  return largest;
}

constexpr int64_t kColumns = 128;

// For `count` <= kColumns columns with `stride` elements from row to row.
template <class T>
TITAN_CPU_CLONES void largest_of_columns(Bits<T>* out, const T* x, int64_t rows, int64_t stride,
                                         int64_t count) {
  constexpr int64_t kVectors = kColumns / kLanes<T>;
  if (count < kColumns) {
    std::fill_n(out, count, Bits<T>(0));
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t i = 0; i < count; ++i) out[i] = std::max(out[i], magnitude(x + row * stride + i));
    return;
  }
  BitVector<T> best[kVectors] = {};
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t i = 0; i < kVectors; ++i)
      best[i] = larger(best[i], magnitudes(x + row * stride + i * kLanes<T>));
  std::memcpy(out, best, sizeof best);
}

float to_float(int32_t bits) { return std::bit_cast<float>(bits); }
float to_float(int16_t bits) { return std::bit_cast<float>(static_cast<int32_t>(bits) << 16); }

template <class T>
void amax_of_matrix(float* out, const T* x, int64_t count) {
  const Bits<T> largest = at::parallel_reduce(
      0, count, 65536, Bits<T>(0),
      [&](int64_t begin, int64_t end, Bits<T> so_far) {
        return std::max(so_far, largest_bits(x + begin, end - begin));
      },
      [](Bits<T> a, Bits<T> b) { return std::max(a, b); });
  *out = to_float(largest);
}

template <class T>
void amax_of_rows(float* out, const T* x, int64_t rows, int64_t columns) {
  at::parallel_for(0, rows, std::max<int64_t>(1, 65536 / columns), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) out[row] = to_float(largest_bits(x + row * columns, columns));
  });
}

template <class T>
void amax_of_columns(float* out, const T* x, int64_t rows, int64_t columns) {
  at::parallel_for(0, (columns + kColumns - 1) / kColumns, std::max<int64_t>(1, 512 / rows),
                   [&](int64_t begin, int64_t end) {
                     for (int64_t block = begin; block < end; ++block) {
                       const int64_t first = block * kColumns, count = std::min(kColumns, columns - first);
                       Bits<T> best[kColumns];
                       largest_of_columns(best, x + first, rows, columns, count);
                       for (int64_t i = 0; i < count; ++i) out[first + i] = to_float(best[i]);
                     }
                   });
}

template <class T>
at::Tensor amax_of(const at::Tensor& x, std::optional<int64_t> dim) {
  const T* from = x.const_data_ptr<T>();
  const auto options = x.options().dtype(at::kFloat);
  at::Tensor out = dim ? at::empty({x.size(1 - *dim), 1}, options) : at::empty({}, options);
  float* to = out.mutable_data_ptr<float>();
  if (!dim) {
    amax_of_matrix(to, from, x.numel());
  } else if (*dim == 1) {
    amax_of_rows(to, from, x.size(0), x.size(1));
  } else {
    amax_of_columns(to, from, x.size(0), x.size(1));
  }
  return out;
}

at::Tensor amax_cpu(const at::Tensor& x, std::optional<int64_t> dim) {
  if (!x.is_contiguous()) return composite::amax(x, dim);
  if (x.scalar_type() == at::kFloat) return amax_of<float>(x, dim);
  if (x.scalar_type() == at::kBFloat16) return amax_of<c10::BFloat16>(x, dim);
  return composite::amax(x, dim);
}

constexpr int64_t kPiece = 65536;

struct Piece {
  size_t tensor;
  int64_t first, count;
};

std::vector<Piece> pieces_of(at::TensorList xs) {
  std::vector<Piece> pieces;
  for (size_t i = 0; i < xs.size(); ++i)
    for (int64_t first = 0; first < xs[i].numel(); first += kPiece)
      pieces.push_back({i, first, std::min(kPiece, xs[i].numel() - first)});
  return pieces;
}

template <class T>
at::Tensor amax_of_many(at::TensorList xs) {
  const std::vector<Piece> pieces = pieces_of(xs);
  std::vector<Bits<T>> found(pieces.size());
  at::parallel_for(0, static_cast<int64_t>(pieces.size()), 1, [&](int64_t begin, int64_t end) {
    for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i)
      found[i] = largest_bits(xs[pieces[i].tensor].const_data_ptr<T>() + pieces[i].first, pieces[i].count);
  });
  std::vector<Bits<T>> largest(xs.size());
  for (size_t i = 0; i < pieces.size(); ++i)
    largest[pieces[i].tensor] = std::max(largest[pieces[i].tensor], found[i]);
  at::Tensor out = at::empty({static_cast<int64_t>(xs.size())}, xs[0].options().dtype(at::kFloat));
  std::transform(largest.begin(), largest.end(), out.mutable_data_ptr<float>(),
                 [](Bits<T> bits) { return to_float(bits); });
  return out;
}

at::Tensor amax_many_cpu(at::TensorList xs) {
  const at::ScalarType dtype = xs[0].scalar_type();
  const bool alike = std::all_of(xs.begin(), xs.end(), [dtype](const at::Tensor& x) {
    return x.scalar_type() == dtype && x.is_contiguous();
  });
  if (alike && dtype == at::kFloat) return amax_of_many<float>(xs);
  if (alike && dtype == at::kBFloat16) return amax_of_many<c10::BFloat16>(xs);
  return composite::amax_many(xs);
}

// The largest value of the format divided by max(amax, 1e-12), in double.
float scale_for(double largest, float amax, bool power_of_two) {
  const auto held = std::isnan(amax) ? static_cast<double>(amax) : std::max<double>(amax, 1e-12);
  const auto scale = static_cast<float>(largest / held);
  if (!power_of_two || std::isnan(scale)) return scale;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(scale) & 0x7f800000u);  // the exponent alone
}

// A single loop over a few numbers, so that a layer's six casts don't take thirty operations.
std::tuple<at::Tensor, at::Tensor> scale_cpu(const at::Tensor& amax, at::ScalarType dtype,
                                             bool power_of_two) {
  const double largest = largest_value(dtype);
  const at::Tensor from = amax.contiguous();
  at::Tensor out = at::empty(amax.sizes(), amax.options()), inverse = at::empty(amax.sizes(), amax.options());
  const float* in = from.const_data_ptr<float>();
  float *to = out.mutable_data_ptr<float>(), *inverted = inverse.mutable_data_ptr<float>();
  for (int64_t i = 0; i < from.numel(); ++i) {
    to[i] = scale_for(largest, in[i], power_of_two);
    inverted[i] = 1.0F / to[i];
  }
  return {out, inverse};
}

at::Tensor delayed_scale_cpu(const at::Tensor& magnitudes, const at::Tensor& pending,
                             const at::Tensor& largest, at::ScalarType dtype, bool power_of_two,
                             bool records) {
  const float history = *largest.const_data_ptr<float>();
  float mine = 0;  // a NaN stays
  const at::Tensor parts = magnitudes.contiguous();
  for (int64_t i = 0; i < parts.numel(); ++i)
    if (const float part = parts.const_data_ptr<float>()[i]; !(part <= mine) && !std::isnan(mine))
      mine = part;
  at::Tensor out = at::empty({}, magnitudes.options());
  auto* scale = out.mutable_data_ptr<float>();
  *scale = std::numeric_limits<float>::quiet_NaN();
  if (!std::isfinite(mine)) return out;
  auto* noted = pending.mutable_data_ptr<float>();
  if (records) *noted = std::max(*noted, mine);
  *scale = scale_for(largest_value(dtype), history > 0 ? history : mine, power_of_two);
  return out;
}

TORCH_LIBRARY_IMPL(titan, CPU, m) {
  m.impl("float8_amax", amax_cpu);
  m.impl("float8_amax_many", amax_many_cpu);
  m.impl("float8_scale", scale_cpu);
  m.impl("float8_delayed_scale", delayed_scale_cpu);
}

}  // namespace
}  // namespace titan::float8
