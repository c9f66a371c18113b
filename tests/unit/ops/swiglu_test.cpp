#include "titan/ops/swiglu.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "titan/core/error.h"
#include "unit/golden.h"

namespace titan::ops {
namespace {

using testing::tolerance_of;

class SwigluTest : public ::testing::TestWithParam<at::ScalarType> {};

TEST_P(SwigluTest, EqualsSiluTimesUp) {
  const at::ScalarType dtype = GetParam();
  const at::Tensor gate = (at::randn({5, 37}) * 4).to(dtype).requires_grad_(),
                   up = at::randn({5, 37}).to(dtype).requires_grad_();
  const at::Tensor grad = at::randn({5, 37}).to(dtype);
  const at::Tensor out = swiglu(gate, up);
  out.backward(grad);
  const at::Tensor wide_gate = gate.detach().to(at::kDouble).requires_grad_(),
                   wide_up = up.detach().to(at::kDouble).requires_grad_();
  const at::Tensor expected = at::silu(wide_gate) * wide_up;
  expected.backward(grad.to(at::kDouble));
  EXPECT_CLOSE(out, expected, tolerance_of(dtype));
  EXPECT_CLOSE(gate.grad(), wide_gate.grad(), tolerance_of(dtype));
  EXPECT_CLOSE(up.grad(), wide_up.grad(), tolerance_of(dtype));
}

INSTANTIATE_TEST_SUITE_P(Types, SwigluTest,
                         ::testing::Values(at::kFloat, at::kDouble, at::kBFloat16, at::kHalf));

TEST(Swiglu, IsFiniteFarOutAndKeepsNaN) {
  const at::Tensor gate =
      at::tensor({-1000.0f, -90.0f, 0.0f, 90.0f, 1000.0f, std::nanf(""), 1.0f, 2.0f, 3.0f});
  const at::Tensor out = swiglu(gate, at::ones_like(gate));
  EXPECT_CLOSE(out.narrow(0, 0, 5), at::silu(gate.narrow(0, 0, 5).to(at::kDouble)), 1e-6);
  EXPECT_TRUE(std::isnan(out[5].item<float>()));
  EXPECT_CLOSE(out.narrow(0, 6, 3), at::silu(gate.narrow(0, 6, 3).to(at::kDouble)), 1e-6);
}

TEST(Swiglu, RefusesDifferentShapes) { EXPECT_THROW(swiglu(at::ones({2, 3}), at::ones({3, 2})), Error); }

}  // namespace
}  // namespace titan::ops
