#include "titan/ops/linear.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "titan/core/error.h"
#include "titan/tensor/param_storage.h"
#include "unit/golden.h"

namespace titan::ops {
namespace {

struct RecordingSink : GradSink {
  void accept(WeightGrad grad) override { sum = sum.defined() ? sum + grad.compute() : grad.compute(); }
  void accept(const at::Tensor& grad_OI, const at::Tensor& scale) override {
    sum = scale.defined() ? grad_OI * scale : grad_OI;
  }
  at::Tensor sum;
};

struct LinearTest : ::testing::Test {
  at::Tensor x = at::randn({2, 3, 5}, at::kDouble).requires_grad_();
  at::Tensor weight = at::randn({4, 5}, at::kDouble).requires_grad_();
  at::Tensor bias = at::randn({4}, at::kDouble).requires_grad_();
  at::Tensor grad = at::randn({2, 3, 4}, at::kDouble);
  std::shared_ptr<const Products> products = default_products();

  std::vector<at::Tensor> expected_grads() {
    return torch::autograd::grad({at::linear(x, weight, bias)}, {x, weight, bias}, {grad});
  }
};

TEST_F(LinearTest, EqualsLibTorchs) {
  const at::Tensor y = linear(x, weight, bias, products);
  EXPECT_CLOSE(y, at::linear(x, weight, bias), 1e-14);
  y.backward(grad);
  const auto expected = expected_grads();
  EXPECT_CLOSE(x.grad(), expected[0], 1e-14);
  EXPECT_CLOSE(weight.grad(), expected[1], 1e-14);
  EXPECT_CLOSE(bias.grad(), expected[2], 1e-14);
}

TEST_F(LinearTest, HandsTheWeightGradientToTheSinkAndAutogradNone) {
  const auto sink = std::make_shared<RecordingSink>();
  linear(x, weight, {}, products, sink).backward(grad);
  EXPECT_CLOSE(sink->sum, expected_grads()[1], 1e-14);
  EXPECT_FALSE(weight.grad().defined());
  EXPECT_TRUE(x.grad().defined());
}

TEST_F(LinearTest, AsksTheSinkOncePerUse) {
  const auto sink = std::make_shared<RecordingSink>();
  const at::Tensor twice = linear(x, weight, {}, products, sink) + linear(x, weight, {}, products, sink);
  twice.backward(grad);
  EXPECT_CLOSE(sink->sum, expected_grads()[1] * 2, 1e-14);
}

TEST_F(LinearTest, ComputesOnlyWhatIsAskedFor) {
  const auto sink = std::make_shared<RecordingSink>();
  const at::Tensor y = linear(x, weight, {}, products, sink);
  EXPECT_CLOSE(torch::autograd::grad({y}, {x}, {grad})[0], expected_grads()[0], 1e-14);
  EXPECT_FALSE(sink->sum.defined());
}

TEST_F(LinearTest, LeavesFrozenWeightsAlone) {
  weight.set_requires_grad(false);
  const auto sink = std::make_shared<RecordingSink>();
  linear(x, weight, {}, products, sink).backward(grad);
  EXPECT_FALSE(sink->sum.defined());
  EXPECT_TRUE(x.grad().defined());
}

TEST_F(LinearTest, SeesAWeightWhoseMemoryWentAndCameBack) {
  const auto expected = expected_grads();
  const at::Tensor values = weight.detach().clone();
  at::Tensor sharded = deferred_tensor({4, 5}, at::kDouble).requires_grad_();
  param_storage::allocate(sharded);
  sharded.variable_data().copy_(values);
  const at::Tensor y = linear(x, sharded, {}, products);
  param_storage::free(sharded);
  param_storage::allocate(sharded);
  sharded.variable_data().copy_(values);
  y.backward(grad);
  EXPECT_CLOSE(x.grad(), expected[0], 1e-14);
  EXPECT_CLOSE(sharded.grad(), expected[1], 1e-14);
}

TEST_F(LinearTest, HasNoSecondDerivative) {
  const at::Tensor y = linear(x, weight, {}, products);
  EXPECT_THROW(torch::autograd::grad({y}, {x}, {grad}, /*retain_graph=*/true, /*create_graph=*/true), Error);
}

TEST_F(LinearTest, RefusesWrongShapesAndTypes) {
  EXPECT_THROW(linear(at::randn({2, 6}, at::kDouble), weight, {}, products), Error);
  EXPECT_THROW(linear(at::randn({2, 5}), weight, {}, products), Error);
}

TEST_F(LinearTest, RecordsNothingWithoutGradients) {
  at::NoGradGuard no_grad;
  EXPECT_FALSE(linear(x, weight, bias, products).requires_grad());
}

}  // namespace
}  // namespace titan::ops
