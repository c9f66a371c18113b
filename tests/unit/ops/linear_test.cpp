#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include "operator_calls.h"
#include "tensor/memory.h"
#include "titan/core/error.h"
#include "titan/ops/functional.h"
#include "titan/ops/linear.h"
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

TEST_F(LinearTest, GivesTheWeightGradientToTheSinkAndNotToAutograd) {
  const auto sink = std::make_shared<RecordingSink>();
  linear(x, {weight, sink}, {}, products).backward(grad);
  EXPECT_CLOSE(sink->sum, expected_grads()[1], 1e-14);
  EXPECT_FALSE(weight.grad().defined());
  EXPECT_TRUE(x.grad().defined());
}

TEST_F(LinearTest, CallsTheSinkOncePerUse) {
  const auto sink = std::make_shared<RecordingSink>();
  const at::Tensor twice = linear(x, {weight, sink}, {}, products) + linear(x, {weight, sink}, {}, products);
  twice.backward(grad);
  EXPECT_CLOSE(sink->sum, expected_grads()[1] * 2, 1e-14);
}

TEST_F(LinearTest, ComputesOnlyRequestedGradients) {
  const auto sink = std::make_shared<RecordingSink>();
  const at::Tensor y = linear(x, {weight, sink}, {}, products);
  EXPECT_CLOSE(torch::autograd::grad({y}, {x}, {grad})[0], expected_grads()[0], 1e-14);
  EXPECT_FALSE(sink->sum.defined());
}

TEST_F(LinearTest, LeavesFrozenWeightsAlone) {
  weight.set_requires_grad(false);
  const auto sink = std::make_shared<RecordingSink>();
  linear(x, {weight, sink}, {}, products).backward(grad);
  EXPECT_FALSE(sink->sum.defined());
  EXPECT_TRUE(x.grad().defined());
}

TEST_F(LinearTest, ReadsAWeightWhoseMemoryWasFreedAndRestored) {
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

// A product after SwiGLU doesn't keep SwiGLU's output ([Note: recomputed outputs]).

namespace {

struct SwigluThenLinear {
  at::Tensor gate = at::linspace(-2, 3, 20, at::kDouble).view({4, 5}).requires_grad_(true);
  at::Tensor up = at::linspace(1, -1, 20, at::kDouble).view({4, 5}).requires_grad_(true);
  at::Tensor weight = at::linspace(-1, 2, 15, at::kDouble).view({3, 5}).requires_grad_(true);

  at::Tensor product(const at::Tensor& x) const { return linear(x, weight, {}, default_products()); }
};

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;
WeakStorage memory_of(const at::Tensor& tensor) { return tensor.storage().getWeakStorageImpl(); }

TEST(SavedInput, RecomputesSwigluInTheBackward) {
  const SwigluThenLinear c;
  at::Tensor hidden = swiglu(c.gate, c.up);
  const WeakStorage hidden_memory = memory_of(hidden);
  const at::Tensor expected_hidden = hidden.detach().clone();
  const at::Tensor out = c.product(hidden);
  hidden.reset();
  EXPECT_TRUE(hidden_memory.expired());
  const at::Tensor grad = at::linspace(1, 2, 12, at::kDouble).view({4, 3});
  out.backward(grad);
  EXPECT_TRUE(at::equal(c.weight.grad(), grad.t().mm(expected_hidden)));
  const at::Tensor grad_hidden = grad.mm(c.weight.detach()), s = c.gate.detach().sigmoid();
  EXPECT_TRUE(at::allclose(c.up.grad(), grad_hidden * c.gate.detach() * s));
  EXPECT_TRUE(at::allclose(c.gate.grad(), grad_hidden * c.up.detach() * s * (1 + c.gate.detach() * (1 - s))));
}

// The weight's gradient needs SwiGLU's output. The pass that computes it has SwiGLU's backward, too.
TEST(SavedInput, RecomputesSwigluInThePassOfItsBackward) {
  const SwigluThenLinear c;
  std::map<std::string, int> calls = testing::operators_of_backward(c.product(swiglu(c.gate, c.up)).sum());
  EXPECT_EQ(calls["titan::swiglu_with_backward"], 1);
  EXPECT_EQ(calls["titan::swiglu"] + calls["titan::swiglu_backward"], 0);
  const SwigluThenLinear frozen;
  frozen.weight.set_requires_grad(false);
  calls = testing::operators_of_backward(frozen.product(swiglu(frozen.gate, frozen.up)).sum());
  EXPECT_EQ(calls["titan::swiglu_backward"], 1);
  EXPECT_EQ(calls["titan::swiglu"] + calls["titan::swiglu_with_backward"], 0);
}

// Gradients of gate, up and weight if `use` makes the result from SwiGLU's output, which `copy` can hide from products.
template <class Use>
std::vector<at::Tensor> gradients_of(const Use& use, bool recomputes) {
  const SwigluThenLinear c;
  const at::Tensor hidden = swiglu(c.gate, c.up);
  use(c, recomputes ? hidden : hidden * 1, hidden).backward();
  return {c.gate.grad(), c.up.grad(), c.weight.grad()};
}

TEST(SavedInput, AChangedGradientIsComputedAgain) {
  const auto used_twice = [](const SwigluThenLinear& c, const at::Tensor& x, const at::Tensor& hidden) {
    return c.product(x).sum() + hidden.square().sum();
  };
  const auto two_products = [](const SwigluThenLinear& c, const at::Tensor& x, const at::Tensor&) {
    return c.product(x).sum() + c.product(x).square().sum();
  };
  const auto hooked = [](const SwigluThenLinear& c, const at::Tensor& x, const at::Tensor& hidden) {
    hidden.register_hook([](const at::Tensor& grad) { return grad * 2; });
    return c.product(x).sum();
  };
  const auto written_by_hook = [](const SwigluThenLinear& c, const at::Tensor& x, const at::Tensor& hidden) {
    hidden.register_hook([](const at::Tensor& grad) { grad.mul_(2); });
    return c.product(x).sum();
  };
  const auto expect_same = [](const auto& use) {
    const auto got = gradients_of(use, true), expected = gradients_of(use, false);
    for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(at::allclose(got[i], expected[i])) << i;
  };
  expect_same(used_twice);
  expect_same(two_products);
  expect_same(hooked);
  expect_same(written_by_hook);
}

TEST(SavedInput, KeepsOtherInputs) {
  const SwigluThenLinear c;
  at::Tensor hidden = swiglu(c.gate, c.up) * 2;
  const WeakStorage hidden_memory = memory_of(hidden);
  const at::Tensor out = c.product(hidden);
  hidden.reset();
  EXPECT_FALSE(hidden_memory.expired());
}

TEST(SavedInput, AllowsASecondBackwardOfAKeptGraph) {
  const SwigluThenLinear c;
  const at::Tensor out = c.product(swiglu(c.gate, c.up)).sum();
  out.backward({}, /*keep_graph=*/true);
  const at::Tensor once = c.weight.grad().clone();
  out.backward();
  EXPECT_TRUE(at::equal(c.weight.grad(), once * 2));
  EXPECT_THROW(out.backward(), c10::Error);
}

TEST(SavedInput, DetectsWritesToTheRecomputationsInputs) {
  const SwigluThenLinear c;
  const at::Tensor gate = c.gate * 1;
  const at::Tensor out = c.product(swiglu(gate, c.up)).sum();
  gate.detach().mul_(2);
  EXPECT_THROW(out.backward(), c10::Error);
}

}  // namespace
}  // namespace titan::ops
