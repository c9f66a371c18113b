#pragma once

// Random numbers in blocks, several at a time in vector registers.

#include <array>
#include <cstdint>
#include <limits>

namespace titan::nn {

/// Ways to the same bits; each needs what its name says of the processor.
enum class DrawLanes { Portable, Avx2, Avx512 };
/// The widest that this processor has.
DrawLanes best_draw_lanes();

/// [Note: the stream]
/// Elements 2i and 2i+1 (row-major index in the whole tensor) of the parameter with name hash h under `seed`
/// share one Philox4x32-10 block with key = seed and counter = (i, h): words 0 and 1 for the first, 2 and 3
/// for the second. The first 52 bits k of these give u = (k + 1/2) / 2^52, strictly between 0 and 1, exact in
/// a double and symmetric around 1/2.
class RandomStream {
 public:
  RandomStream(uint64_t seed, uint64_t name_hash);
  /// Those of elements first_index, first_index + 1, ...
  void uniforms(double* to, int64_t count, uint64_t first_index, DrawLanes lanes = best_draw_lanes()) const;

 private:
  std::array<uint32_t, 2> key_, name_;
};

/// A normal number from a uniform one: mean + std * inverse_normal(offset + scale * u), held within low and
/// high.
struct NormalDraw {
  double offset = 0, scale = 1;  // of the probability
  double mean = 0, std = 1;
  double low = -std::numeric_limits<double>::infinity(), high = std::numeric_limits<double>::infinity();
};

/// In place, with the bits of inverse_normal().
void draw_normals(double* values, int64_t count, const NormalDraw& draw, DrawLanes lanes = best_draw_lanes());

/// Rounded to nearest.
void round_to_floats(float* to, const double* from, int64_t count);

}  // namespace titan::nn
