// A product behind SwiGLU keeps no output of it ([Note: outputs made again]).

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "titan/ops/linear.h"
#include "titan/ops/products.h"
#include "titan/ops/swiglu.h"

namespace titan::ops {
namespace {

struct Case {
  at::Tensor gate = at::linspace(-2, 3, 20, at::kDouble).view({4, 5}).requires_grad_(true);
  at::Tensor up = at::linspace(1, -1, 20, at::kDouble).view({4, 5}).requires_grad_(true);
  at::Tensor weight = at::linspace(-1, 2, 15, at::kDouble).view({3, 5}).requires_grad_(true);

  at::Tensor product(const at::Tensor& x) const { return linear(x, weight, {}, default_products(), nullptr); }
};

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;
WeakStorage memory_of(const at::Tensor& tensor) { return tensor.storage().getWeakStorageImpl(); }

TEST(SavedInput, SwigluIsMadeAgainInTheBackward) {
  const Case c;
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

TEST(SavedInput, OtherInputsAreKept) {
  const Case c;
  at::Tensor hidden = swiglu(c.gate, c.up) * 2;
  const WeakStorage hidden_memory = memory_of(hidden);
  const at::Tensor out = c.product(hidden);
  hidden.reset();
  EXPECT_FALSE(hidden_memory.expired());
}

TEST(SavedInput, AGraphThatIsKeptIsWalkedAgain) {
  const Case c;
  const at::Tensor out = c.product(swiglu(c.gate, c.up)).sum();
  out.backward({}, /*keep_graph=*/true);
  const at::Tensor once = c.weight.grad().clone();
  out.backward();
  EXPECT_TRUE(at::equal(c.weight.grad(), once * 2));
  EXPECT_THROW(out.backward(), c10::Error);
}

TEST(SavedInput, WritingToWhatItIsMadeFromIsNoticed) {
  const Case c;
  const at::Tensor gate = c.gate * 1;
  const at::Tensor out = c.product(swiglu(gate, c.up)).sum();
  gate.detach().mul_(2);
  EXPECT_THROW(out.backward(), c10::Error);
}

}  // namespace
}  // namespace titan::ops
