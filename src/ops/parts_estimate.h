#pragma once

// Whether a GPU gains by multiplying a sequence in parts while other parts are in transit, and by writing a part's product to its
// place.

#include <cstdint>

namespace titan::ops {

// [Note: products in parts, by size]
// A GPU computes a product in tiles of about 128 x 256, one to a multiprocessor at a time, so its time goes in steps: a part with fewer tiles
// than multiprocessors takes as long as one that has as many. Cut into parts, a small product may lose more by that than the transit, or the
// copy, takes that it hides or saves. This compares the two for an H100: 132 multiprocessors of 5 TFLOP/s in bf16 (two thirds of its peak) and
// 10 in Float8, NVLink at 350 GB/s (of 450 in one direction), and a memory of 3.35 TB/s. It is an estimate from the data sheet and hasn't been
// measured.

/// How much longer `count` products of equally many rows take than one of all rows, with so many FLOP/s on a multiprocessor.
inline double seconds_lost_by_cutting(int64_t count, int64_t rows, int64_t inner, int64_t features,
                                      double flops_per_second) {
  constexpr int64_t kTileRows = 128, kTileColumns = 256, kMultiprocessors = 132;
  const auto divided = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const auto rounds = [&](int64_t of_rows) {
    return divided(divided(of_rows, kTileRows) * divided(features, kTileColumns), kMultiprocessors);
  };
  const int64_t lost = count * rounds(rows / count) - rounds(rows);
  return static_cast<double>(lost * 2 * kTileRows * kTileColumns * inner) / flops_per_second;
}

/// A product [rows, inner] x [inner, features] on each of `count` ranks, whose rows are cut into one part for each rank.
struct PartedProduct {
  int64_t count, rows, inner, features;
  int64_t bytes_of_part;  ///< that each rank sends to each other rank
};

/// Whether cutting the product costs less time than the transit of the parts that it hides.
inline bool gains_by_parts(const PartedProduct& product) {
  constexpr double kBytesPerSecond = 350e9;
  const double seconds_hidden =
      static_cast<double>((product.count - 1) * product.bytes_of_part) / kBytesPerSecond;
  return seconds_lost_by_cutting(product.count, product.rows, product.inner, product.features, 5e12) <
         seconds_hidden;
}

/// A product in Float8 whose place, in 16 bits, is `count` matrices with gaps between them: whether one product for each takes less time than
/// to copy the result of one for all.
inline bool gains_by_writing_each(int64_t count, int64_t rows, int64_t inner, int64_t features) {
  const double seconds_to_copy = static_cast<double>(4 * rows * features) / 3.35e12;
  return seconds_lost_by_cutting(count, rows, inner, features, 10e12) < seconds_to_copy;
}

}  // namespace titan::ops
