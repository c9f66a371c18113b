#include <gtest/gtest.h>

#include <string>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "ops/operators.h"
#include "titan/core/error.h"
#include "titan/ops/functional.h"
#include "unit/golden.h"

namespace titan::ops {
namespace {

using testing::Golden;
using testing::tolerance_of;

TEST(Embedding, EqualsPyTorchs) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    const Golden golden("embedding", dtype);
    const at::Tensor weight = golden.leaf("weight");
    const at::Tensor out = ops::embedding(weight, golden["tokens"]);
    out.backward(golden["grad_output"]);
    EXPECT_TRUE(out.equal(golden["output"]));
    EXPECT_CLOSE(weight.grad(), golden["grad_weight"], tolerance_of(dtype));
  }
}

struct EmbeddingSink : GradSink {
  void accept(WeightGrad /*grad*/) override { FAIL() << "an embedding has no product"; }
  void accept(const at::Tensor& grad_OI, const at::Tensor& scale) override {
    kept = scale.defined() ? grad_OI * scale : grad_OI;
  }
  at::Tensor kept;
};

TEST(Embedding, SumsBf16GradientsInFp32) {
  const at::Tensor weight = at::zeros({3, 130}, at::kBFloat16).requires_grad_();
  const auto sink = std::make_shared<EmbeddingSink>();
  const at::Tensor tokens = at::ones({1000}, at::kLong);
  ops::embedding(weight, tokens, sink).backward(at::ones({1000, 130}, at::kBFloat16));
  EXPECT_EQ(sink->kept.scalar_type(), at::kFloat);
  EXPECT_TRUE(sink->kept[1].eq(1000).all().item<bool>());
  EXPECT_EQ(sink->kept[0].abs().sum().item<float>() + sink->kept[2].abs().sum().item<float>(), 0);
  EXPECT_FALSE(weight.grad().defined());
}

TEST(Embedding, RefusesTokensOfAnotherType) {
  EXPECT_THROW(ops::embedding(at::ones({3, 2}), at::ones({2}, at::kInt)), Error);
}

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

// A residual stream of two norms: the sums, and all gradients, equal those of additions.
TEST(AddRmsNorm, EqualsAnAdditionAndANorm) {
  const auto run = [](const std::vector<at::Tensor>& in, bool fused) {
    const at::Tensor &x = in[0], &added = in[1], &first = in[2], &second = in[3];
    if (!fused) {
      const at::Tensor a = rms_norm(x, first, 1e-5), h = x + added * a;
      return h + rms_norm(h, second, 1e-5);
    }
    const NormedSum a = add_rms_norm(x, {}, first, 1e-5),
                    h = add_rms_norm(a.sum, added * a.normed, second, 1e-5);
    EXPECT_EQ(h.sum.grad_fn(), h.normed.grad_fn());
    return h.sum + h.normed;
  };
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
    std::vector<at::Tensor> plain, joint;
    for (const std::vector<int64_t>& sizes :
         std::vector<std::vector<int64_t>>{{5, 33}, {5, 33}, {33}, {33}}) {
      plain.push_back(at::randn(sizes).to(dtype).requires_grad_());
      joint.push_back(plain.back().detach().clone().requires_grad_());
    }
    const at::Tensor grad = at::randn({5, 33}).to(dtype);
    const at::Tensor expected = run(plain, false), got = run(joint, true);
    expected.backward(grad);
    got.backward(grad);
    EXPECT_TRUE(got.equal(expected)) << "CPUs keep their numbers";
    for (size_t i = 0; i < plain.size(); ++i) EXPECT_TRUE(joint[i].grad().equal(plain[i].grad())) << i;
  }
}

TEST(AddRmsNorm, HasGradientsOfEitherOutputAlone) {
  const at::Tensor x = at::randn({4, 8}, at::kDouble).requires_grad_(),
                   added = at::randn({4, 8}, at::kDouble),
                   weight = at::randn({8}, at::kDouble).requires_grad_(),
                   grad = at::randn({4, 8}, at::kDouble);
  add_rms_norm(x, added, weight, 1e-5).sum.backward(grad);
  EXPECT_TRUE(x.grad().equal(grad));
  EXPECT_FALSE(weight.grad().defined());
  x.mutable_grad().reset();
  add_rms_norm(x, added, weight, 1e-5).normed.backward(grad);
  const at::Tensor wide = x.detach().clone().requires_grad_();
  rms_norm(wide + added, weight.detach(), 1e-5).backward(grad);
  EXPECT_TRUE(x.grad().equal(wide.grad()));
  EXPECT_FALSE(add_rms_norm(x.detach(), added, weight, 1e-5).sum.requires_grad());
  EXPECT_THROW(add_rms_norm(x, added.to(at::kFloat), weight, 1e-5), Error);
}

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

TEST(RmsNorm, AcceptsStridedInputAndZeroRows) {
  const at::Tensor weight = at::randn({6});
  const at::Tensor x = at::randn({6, 4}).t();
  EXPECT_TRUE(rms_norm(x, weight, 1e-5).equal(rms_norm(x.contiguous(), weight, 1e-5)));
  EXPECT_EQ(rms_norm(at::empty({0, 6}), weight, 1e-5).sizes(), at::IntArrayRef({0, 6}));
}

using testing::Golden;
using testing::tolerance_of;

at::Tensor table_of(const Golden& golden) {
  return at::stack({golden["table.cos"], golden["table.sin"]}, -1).flatten(1);
}

TEST(Rotary, EqualsPyTorchs) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    const Golden golden("rope", dtype);
    const at::Tensor x = golden.leaf("rotate.input");
    const at::Tensor y = rotary(x, table_of(golden));
    y.backward(golden["rotate.grad_output"]);
    EXPECT_CLOSE(y, golden["rotate.output"], tolerance_of(dtype));
    EXPECT_CLOSE(x.grad(), golden["rotate.grad_input"], tolerance_of(dtype));
  }
}

TEST(Rotary, KernelEqualsComposite) {
  const at::Tensor angles = at::rand({9, 5}) * 6;
  const at::Tensor table = at::stack({angles.cos(), angles.sin()}, -1).flatten(1);
  const at::Tensor positions = at::randint(9, {2, 7});
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    const at::Tensor x = at::randn({2, 7, 3, 10}).to(dtype);
    EXPECT_CLOSE(rotary(x, table, positions),
                 composite::rotary({x.to(at::kDouble)}, table, positions, false)[0], tolerance_of(dtype));
    EXPECT_EQ(rotary(x, table, positions).scalar_type(), dtype);
  }
}

// Queries and keys are rotated as each alone, and so are their gradients, also if one of them has none.
TEST(Rotary, OfQueriesAndKeysEqualsTheComposite) {
  const at::Tensor angles = at::rand({9, 5}, at::kDouble) * 6;
  const at::Tensor table = at::stack({angles.cos(), angles.sin()}, -1).flatten(1);
  for (const at::Tensor& positions : {at::Tensor(), at::randint(9, {7}), at::randint(9, {2, 7})}) {
    const at::Tensor q = at::randn({2, 7, 6, 10}, at::kDouble).requires_grad_(),
                     k = at::randn({2, 7, 2, 10}, at::kDouble).requires_grad_();
    const auto given = positions.defined() ? std::optional(positions) : std::nullopt;
    const at::Tensor wide_q = q.detach().clone().requires_grad_(),
                     wide_k = k.detach().clone().requires_grad_();
    const auto expected = composite::rotary({wide_q, wide_k}, table, given, false);
    const auto [out_q, out_k] = joint_rotary(q, k, table, positions);
    EXPECT_EQ(out_q.grad_fn(), out_k.grad_fn());
    EXPECT_CLOSE(out_q, expected[0], 1e-14);
    EXPECT_CLOSE(out_k, expected[1], 1e-14);
    const at::Tensor grad_q = at::randn_like(q), grad_k = at::randn_like(k);
    ((out_q * grad_q).sum() + (out_k * grad_k).sum()).backward();
    ((expected[0] * grad_q).sum() + (expected[1] * grad_k).sum()).backward();
    EXPECT_CLOSE(q.grad(), wide_q.grad(), 1e-14);
    EXPECT_CLOSE(k.grad(), wide_k.grad(), 1e-14);

    k.mutable_grad().reset();
    joint_rotary(q.detach(), k, table, positions).second.backward(grad_k);
    EXPECT_CLOSE(k.grad(), wide_k.grad(), 1e-14);
    const at::Tensor of_q = std::exchange(q.mutable_grad(), at::Tensor());
    joint_rotary(q, k, table, positions).first.backward(grad_q);
    EXPECT_TRUE(q.grad().equal(of_q));
  }
}

TEST(Rotary, TakesPositions) {
  const Golden golden("rope");
  const at::Tensor x = golden["rotate.input"], table = table_of(golden);
  const at::Tensor order = at::arange(x.size(1));
  EXPECT_TRUE(rotary(x, table, order).equal(rotary(x, table)));
  EXPECT_TRUE(rotary(x, table, order.expand({x.size(0), -1})).equal(rotary(x, table)));
  EXPECT_TRUE(rotary(x.flip(1), table, order.flip(0)).equal(rotary(x, table).flip(1)));
}

TEST(Rotary, RefusesPositionsOutsideItsTable) {
  const Golden golden("rope");
  const at::Tensor x = golden["rotate.input"], table = table_of(golden);
  EXPECT_THROW(rotary(x, table.narrow(0, 0, 8)), Error);
  EXPECT_THROW(rotary(x, table, at::arange(x.size(1)) + 4), Error);
  EXPECT_THROW(rotary(x, table, at::arange(3)), Error);
  EXPECT_THROW(rotary(x.narrow(3, 0, 7), table), Error);
  EXPECT_THROW(joint_rotary(x, x.narrow(1, 0, x.size(1) - 1), table), Error);
}

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
