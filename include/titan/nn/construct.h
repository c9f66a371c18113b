#pragma once

// Construct: where and how modules make their parameters.

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

namespace titan::nn {

/// Where and how a module makes its parameters. Passed down by constructors.
struct Construct {
  at::Device device = at::kCPU;
  at::ScalarType dtype = at::kFloat;
  bool deferred = false;  ///< sizes only; materialize() allocates and initializes what this rank keeps
};

}  // namespace titan::nn

namespace titan {
using nn::Construct;
/// Parameters with sizes only on `device`: nothing is allocated until materialize().
inline Construct deferred(at::Device device, at::ScalarType dtype = at::kFloat) {
  return {device, dtype, true};
}
}  // namespace titan
