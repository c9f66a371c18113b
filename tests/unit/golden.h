#pragma once

// Values from PyTorch (tests/data/golden) and comparisons with them.

#include <filesystem>
#include <string>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "titan/checkpoint/safetensors.h"

namespace titan::testing {

/// One file of tests/data/golden, at one precision.
class Golden {
 public:
  explicit Golden(const std::string& name, at::ScalarType dtype = at::kDouble)
      : file_(std::filesystem::path(TITAN_SOURCE_DIR) / "tests/data/golden" / (name + ".safetensors")),
        prefix_(dtype == at::kDouble ? "f64." : "f32.") {}
  at::Tensor operator[](const std::string& key) const { return file_.tensor(prefix_ + key).clone(); }
  /// A leaf that takes gradients.
  at::Tensor leaf(const std::string& key) const { return (*this)[key].requires_grad_(); }

 private:
  SafetensorsFile file_;
  std::string prefix_;
};

/// ||actual - expected|| / ||expected||, in double, whichever devices they are on.
inline double relative_error(const at::Tensor& actual, const at::Tensor& expected) {
  const at::Tensor a = actual.detach().to(at::kCPU, at::kDouble),
                   e = expected.detach().to(at::kCPU, at::kDouble);
  const double norm = e.norm().item<double>();
  return (a - e).norm().item<double>() / (norm > 0 ? norm : 1.0);
}

/// The error that rounding leaves after a few operations in this precision.
inline double tolerance_of(at::ScalarType dtype) {
  return dtype == at::kDouble ? 1e-13 : dtype == at::kFloat ? 1e-6 : 6e-3;
}

inline ::testing::AssertionResult is_close(const at::Tensor& actual, const at::Tensor& expected,
                                           double tolerance) {
  if (actual.sizes() != expected.sizes())
    return ::testing::AssertionFailure() << "shape " << actual.sizes() << ", expected " << expected.sizes();
  const double error = relative_error(actual, expected);
  if (error <= tolerance) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "relative error " << error << ", allowed " << tolerance;
}

#define EXPECT_CLOSE(actual, expected, tolerance) \
  EXPECT_TRUE(::titan::testing::is_close(actual, expected, tolerance))

}  // namespace titan::testing
