#include "titan/ops/rms_norm.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include "ops/composite.h"
#include "ops/operators.h"
#include "unit/golden.h"

namespace titan::ops {
namespace {

using testing::Golden;
using testing::tolerance_of;

TEST(RmsNorm, EqualsPyTorchs) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    const Golden golden("rms_norm", dtype);
    const at::Tensor x = golden.leaf("input"), weight = golden.leaf("weight");
    const at::Tensor y = rms_norm(x, weight, 1e-5);
    y.backward(golden["grad_output"]);
    EXPECT_CLOSE(y, golden["output"], tolerance_of(dtype));
    EXPECT_CLOSE(x.grad(), golden["grad_input"], tolerance_of(dtype));
    EXPECT_CLOSE(weight.grad(), golden["grad_weight"], tolerance_of(dtype));
  }
}

class RmsNormSizes : public ::testing::TestWithParam<std::tuple<int64_t, at::ScalarType>> {};

TEST_P(RmsNormSizes, KernelEqualsComposite) {
  const auto [size, dtype] = GetParam();
  const at::Tensor x = at::randn({70, size}).to(dtype).requires_grad_(),
                   weight = at::randn({size}).to(dtype).requires_grad_();
  const at::Tensor grad = at::randn({70, size}).to(dtype);
  const at::Tensor y = rms_norm(x, weight, 1e-5);
  y.backward(grad);
  at::NoGradGuard no_grad;
  const auto wide = [](const at::Tensor& t) { return t.detach().to(at::kDouble); };
  const auto [expected, rstd] = composite::rms_norm(wide(x), wide(weight), 1e-5);
  const auto [grad_x, grad_weight] = composite::rms_norm_backward(wide(grad), wide(x), wide(weight), rstd);
  EXPECT_CLOSE(y, expected, tolerance_of(dtype));
  EXPECT_CLOSE(x.grad(), grad_x, 3 * tolerance_of(dtype));
  EXPECT_CLOSE(weight.grad(), grad_weight, 3 * tolerance_of(dtype));
  EXPECT_EQ(y.scalar_type(), dtype);
}

INSTANTIATE_TEST_SUITE_P(Sizes, RmsNormSizes,
                         ::testing::Combine(::testing::Values(2, 7, 8, 24, 33, 256),
                                            ::testing::Values(at::kFloat, at::kDouble, at::kBFloat16,
                                                              at::kHalf)));

TEST(RmsNorm, GivesTheSameBitsForAnyNumberOfThreads) {
  const at::Tensor x = at::randn({3000, 64}).requires_grad_(), grad = at::randn({3000, 64});
  const int threads = at::get_num_threads();
  std::vector<at::Tensor> grads;
  for (const int count : {1, 2, 3}) {
    at::set_num_threads(count);
    const at::Tensor weight = at::ones({64}).requires_grad_();
    rms_norm(x, weight, 1e-5).backward(grad);
    grads.push_back(weight.grad());
  }
  at::set_num_threads(threads);
  EXPECT_TRUE(grads[0].equal(grads[1]) && grads[0].equal(grads[2]));
}

TEST(RmsNorm, TakesStridedInputAndNoRows) {
  const at::Tensor weight = at::randn({6});
  const at::Tensor x = at::randn({6, 4}).t();
  EXPECT_TRUE(rms_norm(x, weight, 1e-5).equal(rms_norm(x.contiguous(), weight, 1e-5)));
  EXPECT_EQ(rms_norm(at::empty({0, 6}), weight, 1e-5).sizes(), at::IntArrayRef({0, 6}));
}

}  // namespace
}  // namespace titan::ops
