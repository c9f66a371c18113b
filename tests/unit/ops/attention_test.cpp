#include "titan/ops/attention.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "titan/core/error.h"
#include "unit/golden.h"

namespace titan::ops {
namespace {

using testing::tolerance_of;

// softmax(q k^T / sqrt(D)) v written out, in float64.
at::Tensor reference(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  const int64_t group = q.size(2) / k.size(2), length = q.size(1);
  const at::Tensor keys = k.repeat_interleave(group, 2).transpose(1, 2),
                   values = v.repeat_interleave(group, 2).transpose(1, 2);
  const at::Tensor hidden = at::ones({length, length}, at::kBool).triu(1);
  at::Tensor scores =
      at::matmul(q.transpose(1, 2), keys.transpose(2, 3)) / std::sqrt(static_cast<double>(q.size(3)));
  scores = scores.masked_fill(hidden, -std::numeric_limits<double>::infinity());
  return at::matmul(at::softmax(scores, -1), values).transpose(1, 2);
}

class AttentionTest : public ::testing::TestWithParam<std::tuple<at::ScalarType, int64_t>> {};

TEST_P(AttentionTest, EqualsItsDefinition) {
  const auto [dtype, kv_heads] = GetParam();
  const auto make = [dtype = dtype](int64_t heads) {
    return at::randn({2, 37, heads, 16}).to(dtype).requires_grad_();
  };
  const at::Tensor q = make(4), k = make(kv_heads), v = make(kv_heads);
  const at::Tensor grad = at::randn({2, 37, 4, 16}).to(dtype);
  const at::Tensor out = causal_attention(q, k, v);
  out.backward(grad);
  std::vector<at::Tensor> wide;
  for (const at::Tensor& t : {q, k, v}) wide.push_back(t.detach().to(at::kDouble).requires_grad_());
  const at::Tensor expected = reference(wide[0], wide[1], wide[2]);
  expected.backward(grad.to(at::kDouble));
  const double tolerance = 2 * tolerance_of(dtype);
  EXPECT_CLOSE(out, expected, tolerance);
  EXPECT_CLOSE(q.grad(), wide[0].grad(), tolerance);
  EXPECT_CLOSE(k.grad(), wide[1].grad(), tolerance);
  EXPECT_CLOSE(v.grad(), wide[2].grad(), tolerance);
  EXPECT_EQ(out.scalar_type(), dtype);
}

INSTANTIATE_TEST_SUITE_P(Types, AttentionTest,
                         ::testing::Combine(::testing::Values(at::kFloat, at::kDouble, at::kBFloat16),
                                            ::testing::Values(1, 2, 4)));

TEST(Attention, RefusesHeadsThatDontGroup) {
  const at::Tensor q = at::randn({1, 3, 4, 8}), k = at::randn({1, 3, 3, 8});
  EXPECT_THROW(causal_attention(q, k, k), Error);
}

}  // namespace
}  // namespace titan::ops
