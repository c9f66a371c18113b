#pragma once

// Initial weights that don't depend on the layout. One uniform number per element, from Philox4x32-10 keyed
// by seed, parameter name and the element's global index, turned into a (truncated) normal by the inverse
// distribution function (Wichura, AS241) in fixed-order double arithmetic: the same bits on any rank and
// mesh.

#include <cstdint>
#include <string>
#include <string_view>

#include <ATen/core/Tensor.h>

#include "titan/tensor/placement.h"

namespace titan::nn {

/// A distribution to draw a parameter from.
struct Init {
  enum class Kind { Constant, Normal, TruncatedNormal, Uniform };
  Kind kind = Kind::Constant;
  double mean = 0;  ///< Constant: the value
  double std = 1;
  double low = 0;  ///< Uniform and TruncatedNormal: absolute bounds
  double high = 0;

  static Init constant(double value) { return {Kind::Constant, value, 0, 0, 0}; }
  static Init normal(double mean, double std) { return {Kind::Normal, mean, std, 0, 0}; }
  static Init truncated_normal(double std, double low, double high) {
    return {Kind::TruncatedNormal, 0, std, low, high};
  }
  static Init uniform(double low, double high) { return {Kind::Uniform, 0, 0, low, high}; }
};

struct ParamInit {
  std::string name;  ///< within its module: "weight"
  Init init;
};

/// Fills `local` (any float dtype, contiguous, the part `box` of a tensor of `global_shape`) with its
/// elements of the stream (seed, name). Values are computed in double, rounded once to `local`'s dtype. On
/// CPU; other devices receive a copy.
void fill(const at::Tensor& local, const Init& init, uint64_t seed, std::string_view name,
          at::IntArrayRef global_shape, const Box& box);

}  // namespace titan::nn
