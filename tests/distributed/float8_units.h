#pragma once

// The Float8 arithmetic of distributed tests, and the expected nearness to one rank's results.

#include <string>

#include "dist/device_backend.h"
#include "distributed/world.h"
#include "titan/float8/convert.h"

namespace titan::testing {

/// The hardware's products on a GPU that has them, otherwise emulated.
inline float8::Arithmetic arithmetic_of(const float8::Recipe& recipe) {
  const bool units = device().is_cuda() && dist::device_backend()->compute_capability(device().index()) >=
                                               float8::first_capability(recipe);
  return units ? float8::Arithmetic::Hardware : float8::Arithmetic::Emulated;
}
/// "delayed" is tensorwise.
inline float8::Arithmetic arithmetic_of(const std::string& recipe) {
  return arithmetic_of(float8::recipes().get(recipe == "delayed" ? "tensorwise" : recipe));
}

/// [Note: roundings that flip] The operands of a layer equal one rank's exactly if its input does
/// (float8_layer_test.cpp). But sums in another order differ in fp32's last bits, and occasionally a later
/// layer's cast rounds such a value the other way, by up to an eighth of the value in e4m3 or a quarter in
/// e5m2. One such value in a matrix of 4096 (a weight, or a rank's activations) changes a gradient by about
/// 1/8 / sqrt(4096) = 2e-3 of its norm. The largest deviation on 2 to 8 ranks was 8.4e-5 in pipelines and
/// 6.1e-6 elsewhere, with losses off by 7.7e-7; on another processor other values flip. When each rank scaled
/// its part separately, results were off by 0.25 to 0.4.
struct Nearness {
  double sums = 1e-6;       ///< one layer's results, for a given input
  double loss = 1e-4;       ///< a model's loss
  double gradients = 3e-3;  ///< each gradient
};

/// A GPU's hardware sums with fewer bits than fp32 (about 14 on Hopper), so sums in another order differ
/// more, and more casts flip. These are guesses, because no GPU was available to measure.
inline Nearness nearness_of(float8::Arithmetic arithmetic) {
  if (device().is_cuda() && arithmetic == float8::Arithmetic::Hardware)
    return {.sums = 5e-3, .loss = 2e-3, .gradients = 5e-2};
  return {};
}

}  // namespace titan::testing
