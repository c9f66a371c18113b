// Random initial values that depend only on the seed, the parameter's name and the element's index, so any
// shard of any layout can draw its own.

#include "titan/nn/hooks.h"

#include <algorithm>
#include <optional>

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include "dist/planned_devices.h"
#include "nn/random_block.h"
#include "titan/core/error.h"

namespace titan::nn {

namespace {

uint64_t fnv1a_64(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325ull;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
  return hash;
}

// Maps uniform numbers in place to normal ones, or to low + (high - low) * u.
struct Draw {
  std::optional<NormalDraw> normal;
  double low = 0, range = 1;

  void operator()(double* values, int64_t count) const {
    if (normal) return draw_normals(values, count, *normal);
    for (int64_t i = 0; i < count; ++i) values[i] = low + range * values[i];
  }
};

Draw make_draw(const Init& init) {
  switch (init.kind) {
    case Init::Kind::Uniform:
      return {.normal = std::nullopt, .low = init.low, .range = init.high - init.low};
    case Init::Kind::Normal:
      return {.normal = NormalDraw{.mean = init.mean, .std = init.std}};
    case Init::Kind::TruncatedNormal: {
      TITAN_CHECK(init.std > 0 && init.low < init.high, "a truncated normal of std ", init.std, " between ",
                  init.low, " and ", init.high, ": expected std > 0 and low < high");
      const double from = normal_distribution((init.low - init.mean) / init.std);
      const double to = normal_distribution((init.high - init.mean) / init.std);
      TITAN_CHECK(from < to, "no double is between the probabilities of ", init.low, " and ", init.high,
                  " under a normal of mean ", init.mean, " and std ", init.std);
      return {.normal = NormalDraw{from, to - from, init.mean, init.std, init.low, init.high}};
    }
    case Init::Kind::Constant:
      break;
  }
  TITAN_INTERNAL_ASSERT(false, "a constant needs no draw");
}

// Rounds to odd (Boldo and Melquiond): inexact results end in an odd bit, so that rounding to fewer bits
// later gives the same result as rounding the exact value.
float round_to_odd(double value) {
  const float nearest = static_cast<float>(value);
  if (static_cast<double>(nearest) == value) return nearest;
  uint32_t bits = std::bit_cast<uint32_t>(nearest);
  if (std::abs(static_cast<double>(nearest)) > std::abs(value)) --bits;
  return std::bit_cast<float>(bits | 1u);
}

template <class T>
void round_to(T* to, const double* from, int64_t count) {
  if constexpr (std::is_same_v<T, float>) return round_to_floats(to, from, count);
  for (int64_t i = 0; i < count; ++i) {
    if constexpr (sizeof(T) < sizeof(float)) {
      to[i] = static_cast<T>(round_to_odd(from[i]));
    } else {
      to[i] = static_cast<T>(from[i]);
    }
  }
}

// The rows of a box and the place of each in the whole tensor. A row is contiguous there: it is the last
// dimension, joined with those before it as long as the box spans all later dimensions.
class BoxRows {
 public:
  BoxRows(at::IntArrayRef global_shape, const Box& box) {
    bool whole = true;  // the box spans all dimensions from here on
    uint64_t stride = 1;
    for (size_t dim = global_shape.size(); dim-- > 0;) {
      if (whole) {
        first_ += stride * static_cast<uint64_t>(box.offset[dim]);
        row_length_ *= box.length[dim];
        whole = box.length[dim] == global_shape[dim];
      } else {
        outer_.push_back({stride, box.offset[dim], box.length[dim]});
      }
      stride *= static_cast<uint64_t>(global_shape[dim]);
    }
  }

  int64_t row_length() const { return row_length_; }
  uint64_t first_global_index(int64_t row) const {
    uint64_t index = first_;
    for (const Dimension& dim : outer_) {
      index += dim.stride * static_cast<uint64_t>(dim.offset + row % dim.length);
      row /= dim.length;
    }
    return index;
  }

 private:
  struct Dimension {
    uint64_t stride;
    int64_t offset, length;
  };
  std::vector<Dimension> outer_;  // innermost first
  uint64_t first_ = 0;
  int64_t row_length_ = 1;
};

// The values to fill a box with.
struct Elements {
  RandomStream stream;
  Draw draw;
  BoxRows rows;
};

// Draws elements begin..end of a box in blocks, which may span several rows.
template <class T>
void draw_range(T* out, int64_t begin, int64_t end, const Elements& elements) {
  constexpr int64_t kBlock = 1024;
  double values[kBlock];
  const auto& [stream, draw, rows] = elements;
  const int64_t length = rows.row_length();
  for (int64_t block = begin; block < end; block += kBlock) {
    const int64_t block_end = std::min(end, block + kBlock);
    for (int64_t i = block; i < block_end;) {
      const int64_t row = i / length, row_end = std::min(block_end, (row + 1) * length);
      stream.uniforms(values + (i - block), row_end - i,
                      rows.first_global_index(row) + static_cast<uint64_t>(i - row * length));
      i = row_end;
    }
    draw(values, block_end - block);
    round_to(out + block, values, block_end - block);
  }
}

void check_box(const at::Tensor& local, at::IntArrayRef global_shape, const Box& box) {
  TITAN_CHECK(box.offset.size() == global_shape.size() && box.length.size() == global_shape.size(),
              "fill: a box of ", box.length.size(), " dimensions in a tensor of ", global_shape.size());
  for (size_t dim = 0; dim < global_shape.size(); ++dim)
    TITAN_CHECK(box.offset[dim] >= 0 && box.length[dim] >= 0 &&
                    box.offset[dim] + box.length[dim] <= global_shape[dim],
                "fill: the box exceeds the tensor in dimension ", dim, ": ", box.offset[dim], " + ",
                box.length[dim], " > ", global_shape[dim]);
  TITAN_CHECK(local.numel() == box.numel() && local.is_contiguous(), "fill: expected a contiguous tensor of ",
              box.numel(), " elements, got ", local.numel());
}

}  // namespace

void fill(const at::Tensor& local, const Init& init, const InitStream& stream, at::IntArrayRef global_shape,
          const Box& box) {
  check_box(local, global_shape, box);
  if (local.numel() == 0 || local.is_meta() || dist::is_planned(local.device())) return;
  if (init.kind == Init::Kind::Constant) {
    local.fill_(init.mean);
    return;
  }
  if (!local.is_cpu()) {
    const at::Tensor host = at::empty(local.sizes(), local.options().device(at::kCPU));
    fill(host, init, stream, global_shape, box);
    local.copy_(host);
    return;
  }
  const Elements elements{RandomStream(stream.seed, fnv1a_64(stream.name)), make_draw(init),
                          BoxRows(global_shape, box)};
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, local.scalar_type(), "titan::nn::fill", [&] {
    at::parallel_for(0, local.numel(), /*grain_size=*/4096, [&](int64_t begin, int64_t end) {
      draw_range(local.mutable_data_ptr<scalar_t>(), begin, end, elements);
    });
  });
}

}  // namespace titan::nn
