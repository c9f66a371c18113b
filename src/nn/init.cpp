#include "titan/nn/init.h"

#include <algorithm>
#include <bit>

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include "nn/inverse_normal.h"
#include "nn/philox.h"
#include "titan/core/error.h"

namespace titan::nn {

namespace {

// [Note: the stream]
// Element i (row-major index in the whole tensor) of parameter `name` under `seed` comes from one
// Philox4x32-10 block with key = seed and counter = (i, FNV-1a-64(name)). Its first 52 bits k give u = (k +
// 1/2) / 2^52, strictly between 0 and 1, exact in a double and symmetric around 1/2.

uint64_t fnv1a_64(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325ull;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
  return hash;
}

struct Stream {
  std::array<uint32_t, 2> key;
  uint32_t name_low, name_high;

  Stream(uint64_t seed, std::string_view name)
      : key{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)} {
    const uint64_t hash = fnv1a_64(name);
    name_low = static_cast<uint32_t>(hash);
    name_high = static_cast<uint32_t>(hash >> 32);
  }
  double uniform(uint64_t index) const {
    const PhiloxBlock block = philox4x32_10(
        {static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32), name_low, name_high}, key);
    const uint64_t bits = (static_cast<uint64_t>(block[0]) << 20) | (block[1] >> 12);
    return (static_cast<double>(bits) + 0.5) * 0x1p-52;
  }
};

// A draw as mean + std * z(p), with p = offset + scale * u; or low + (high - low) * u.
struct Draw {
  bool normal;
  double offset, scale;  // of the probability, or of the value itself
  double mean, std, low, high;

  double operator()(double u) const {
    const double at = offset + scale * u;
    if (!normal) return at;
    return std::clamp(mean + std * inverse_normal(at), low, high);
  }
};

constexpr double kInfinity = std::numeric_limits<double>::infinity();

Draw make_draw(const Init& init) {
  switch (init.kind) {
    case Init::Kind::Uniform:
      return {false, init.low, init.high - init.low, 0, 0, 0, 0};
    case Init::Kind::Normal:
      return {true, 0, 1, init.mean, init.std, -kInfinity, kInfinity};
    case Init::Kind::TruncatedNormal: {
      TITAN_CHECK(init.std > 0 && init.low < init.high, "a truncated normal of std ", init.std, " between ",
                  init.low, " and ", init.high, ": expected std > 0 and low < high");
      const double from = normal_distribution((init.low - init.mean) / init.std);
      const double to = normal_distribution((init.high - init.mean) / init.std);
      TITAN_CHECK(from < to, "no double lies between the probabilities of ", init.low, " and ", init.high,
                  " under a normal of mean ", init.mean, " and std ", init.std);
      return {true, from, to - from, init.mean, init.std, init.low, init.high};
    }
    case Init::Kind::Constant:
      break;
  }
  TITAN_INTERNAL_ASSERT(false, "a constant isn't drawn");
}

// double -> float that keeps what a later rounding to fewer bits must know: inexact results end in an odd
// bit, so the second rounding is that of the exact value (Boldo and Melquiond's round to odd).
float round_to_odd(double value) {
  const float nearest = static_cast<float>(value);
  if (static_cast<double>(nearest) == value) return nearest;
  uint32_t bits = std::bit_cast<uint32_t>(nearest);
  if (std::abs(static_cast<double>(nearest)) > std::abs(value)) --bits;
  return std::bit_cast<float>(bits | 1u);
}

template <class T>
T rounded(double value) {
  if constexpr (sizeof(T) < sizeof(float)) {
    return static_cast<T>(round_to_odd(value));
  } else {
    return static_cast<T>(value);
  }
}

// Walks a box row by row (a row: the elements along the last dimension) and says where each row lies in the
// whole.
class BoxRows {
 public:
  BoxRows(at::IntArrayRef global_shape, const Box& box) : shape_(global_shape), box_(box) {}

  int64_t row_length() const { return box_.length.empty() ? 1 : box_.length.back(); }
  uint64_t first_global_index(int64_t row) const {
    if (shape_.empty()) return 0;
    uint64_t index = static_cast<uint64_t>(box_.offset.back());
    uint64_t stride = static_cast<uint64_t>(shape_.back());
    for (size_t dim = shape_.size() - 1; dim-- > 0;) {
      index += stride * static_cast<uint64_t>(box_.offset[dim] + row % box_.length[dim]);
      row /= box_.length[dim];
      stride *= static_cast<uint64_t>(shape_[dim]);
    }
    return index;
  }

 private:
  at::IntArrayRef shape_;
  const Box& box_;
};

template <class T>
void draw_elements(T* out, int64_t numel, const Stream& stream, const Draw& draw, const BoxRows& rows) {
  const int64_t length = rows.row_length();
  at::parallel_for(0, numel, /*grain_size=*/4096, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end;) {
      const int64_t row = i / length;
      const int64_t row_end = std::min(end, (row + 1) * length);
      uint64_t index = rows.first_global_index(row) + static_cast<uint64_t>(i - row * length);
      for (; i < row_end; ++i) out[i] = rounded<T>(draw(stream.uniform(index++)));
    }
  });
}

void check_box(const at::Tensor& local, at::IntArrayRef global_shape, const Box& box) {
  TITAN_CHECK(box.offset.size() == global_shape.size() && box.length.size() == global_shape.size(),
              "fill: a box of ", box.length.size(), " dimensions in a tensor of ", global_shape.size());
  for (size_t dim = 0; dim < global_shape.size(); ++dim)
    TITAN_CHECK(box.offset[dim] >= 0 && box.length[dim] >= 0 &&
                    box.offset[dim] + box.length[dim] <= global_shape[dim],
                "fill: the box leaves the tensor in dimension ", dim, ": ", box.offset[dim], " + ",
                box.length[dim], " > ", global_shape[dim]);
  TITAN_CHECK(local.numel() == box.numel() && local.is_contiguous(), "fill: expected a contiguous tensor of ",
              box.numel(), " elements, got ", local.numel());
}

}  // namespace

void fill(const at::Tensor& local, const Init& init, uint64_t seed, std::string_view name,
          at::IntArrayRef global_shape, const Box& box) {
  check_box(local, global_shape, box);
  if (local.numel() == 0 || local.is_meta()) return;
  if (init.kind == Init::Kind::Constant) {
    local.fill_(init.mean);
    return;
  }
  if (!local.is_cpu()) {
    const at::Tensor host = at::empty(local.sizes(), local.options().device(at::kCPU));
    fill(host, init, seed, name, global_shape, box);
    local.copy_(host);
    return;
  }
  const Stream stream(seed, name);
  const Draw draw = make_draw(init);
  const BoxRows rows(global_shape, box);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, local.scalar_type(), "titan::nn::fill", [&] {
    draw_elements(local.mutable_data_ptr<scalar_t>(), local.numel(), stream, draw, rows);
  });
}

}  // namespace titan::nn
