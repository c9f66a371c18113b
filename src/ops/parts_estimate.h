#pragma once

// Whether a GPU gains by multiplying a sequence in parts while other parts are in transit.

#include <cstdint>

namespace titan::ops {

/// A product [rows, inner] x [inner, features] on each of `count` ranks, whose rows are cut into one part for each rank.
struct PartedProduct {
  int64_t count, rows, inner, features;
  int64_t bytes_of_part;  ///< that each rank sends to each other rank
};

/// [Note: products in parts, by size]
/// A GPU computes a product in tiles of about 128 x 256, one to a multiprocessor at a time, so its time goes in steps: a part with fewer tiles
/// than multiprocessors takes as long as one that has as many. Cut into parts, a small product may lose more by that than the transit takes that
/// it hides. This compares the two for an H100: 132 multiprocessors of 5 TFLOP/s in bf16 (two thirds of its peak), and NVLink at 350 GB/s (of
/// 450 in one direction). It is an estimate from the data sheet and hasn't been measured.
inline bool gains_by_parts(const PartedProduct& product) {
  constexpr int64_t kTileRows = 128, kTileColumns = 256, kMultiprocessors = 132;
  constexpr double kFlopsPerSecond = 5e12, kBytesPerSecond = 350e9;
  const auto divided = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const auto rounds = [&](int64_t rows) {
    return divided(divided(rows, kTileRows) * divided(product.features, kTileColumns), kMultiprocessors);
  };
  const int64_t lost = product.count * rounds(product.rows / product.count) - rounds(product.rows);
  const double seconds_lost =
      static_cast<double>(lost * 2 * kTileRows * kTileColumns * product.inner) / kFlopsPerSecond;
  const double seconds_hidden =
      static_cast<double>((product.count - 1) * product.bytes_of_part) / kBytesPerSecond;
  return seconds_lost < seconds_hidden;
}

}  // namespace titan::ops
