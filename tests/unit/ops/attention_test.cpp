#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "ops/attention.h"
#include "ops/saved_outputs.h"
#include "titan/core/error.h"
#include "titan/ops/functional.h"
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

struct SquareSizes {
  int64_t length, heads, kv_heads, size;
};

void PrintTo(const SquareSizes& sizes, std::ostream* out) {
  *out << sizes.length << " x " << sizes.heads << "/" << sizes.kv_heads << " x " << sizes.size;
}

// `spread` makes the scores larger, so that the running maximum changes from block to block.
void expect_equal_to_definition(at::ScalarType dtype, const SquareSizes& sizes, double spread,
                                double tolerance) {
  const auto make = [&](int64_t heads, double scale) {
    return (at::randn({2, sizes.length, heads, sizes.size}) * scale).to(dtype).requires_grad_();
  };
  const at::Tensor q = make(sizes.heads, spread), k = make(sizes.kv_heads, 1), v = make(sizes.kv_heads, 1);
  const at::Tensor grad = at::randn(q.sizes()).to(dtype);
  const at::Tensor out = causal_attention(q, k, v);
  out.backward(grad);
  std::vector<at::Tensor> wide;
  for (const at::Tensor& t : {q, k, v}) wide.push_back(t.detach().to(at::kDouble).requires_grad_());
  const at::Tensor expected = reference(wide[0], wide[1], wide[2]);
  expected.backward(grad.to(at::kDouble));
  EXPECT_CLOSE(out, expected, tolerance);
  EXPECT_CLOSE(q.grad(), wide[0].grad(), tolerance);
  EXPECT_CLOSE(k.grad(), wide[1].grad(), tolerance);
  EXPECT_CLOSE(v.grad(), wide[2].grad(), tolerance);
  EXPECT_EQ(out.scalar_type(), dtype);
}

class AttentionTest : public ::testing::TestWithParam<std::tuple<at::ScalarType, SquareSizes>> {
 protected:
  void SetUp() override { at::manual_seed(1); }
  at::ScalarType dtype() const { return std::get<0>(GetParam()); }
  const SquareSizes& sizes() const { return std::get<1>(GetParam()); }
};

TEST_P(AttentionTest, EqualsItsDefinition) {
  expect_equal_to_definition(dtype(), sizes(), 1, 2 * tolerance_of(dtype()));
}

TEST_P(AttentionTest, EqualsItsDefinitionWithLargeScores) {
  expect_equal_to_definition(dtype(), sizes(), 8, 8 * tolerance_of(dtype()));
}

// One query, less than a block, whole blocks, several blocks and a rest; head sizes that aren't multiples of
// a vector or a panel.
INSTANTIATE_TEST_SUITE_P(
    All, AttentionTest,
    ::testing::Combine(::testing::Values(at::kFloat, at::kDouble, at::kBFloat16),
                       ::testing::Values(SquareSizes{1, 4, 2, 16}, SquareSizes{37, 4, 1, 16},
                                         SquareSizes{48, 4, 4, 6}, SquareSizes{96, 2, 1, 64},
                                         SquareSizes{97, 4, 2, 80}, SquareSizes{200, 3, 3, 6},
                                         SquareSizes{200, 2, 1, 128})));

TEST(Attention, DoesntDependOnTheNumberOfThreads) {
  at::manual_seed(2);
  const int before = at::get_num_threads();
  const at::Tensor q0 = at::randn({3, 130, 4, 16}), k0 = at::randn({3, 130, 2, 16}),
                   v0 = at::randn({3, 130, 2, 16});
  std::vector<at::Tensor> results;
  for (const int threads : {1, 3}) {
    at::set_num_threads(threads);
    const at::Tensor q = q0.clone().requires_grad_(), k = k0.clone().requires_grad_(),
                     v = v0.clone().requires_grad_();
    const at::Tensor out = causal_attention(q, k, v);
    out.sum().backward();
    for (const at::Tensor& t : {out.detach(), q.grad(), k.grad(), v.grad()}) results.push_back(t);
  }
  at::set_num_threads(before);
  for (size_t i = 0; i < 4; ++i) EXPECT_TRUE(at::equal(results[i], results[i + 4])) << i;
}

// LibTorch's CPU kernel assumes that the features of a head are adjacent.
TEST(Attention, TakesTensorsOfAnyStrides) {
  at::manual_seed(3);
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
    const auto make = [&](int64_t heads) { return at::randn({2, 16, heads, 37}).to(dtype).transpose(1, 3); };
    std::vector<at::Tensor> strided, plain;
    for (const int64_t heads : {4, 2, 2}) {
      const at::Tensor values = make(heads);
      strided.push_back(values.detach().requires_grad_());
      plain.push_back(values.contiguous().requires_grad_());
      ASSERT_NE(strided.back().stride(3), 1);
    }
    const at::Tensor out = causal_attention(strided[0], strided[1], strided[2]),
                     expected = causal_attention(plain[0], plain[1], plain[2]);
    EXPECT_CLOSE(out, expected, tolerance_of(dtype));
    out.sum().backward();
    expected.backward(at::ones(expected.sizes(), expected.options()));
    for (size_t i = 0; i < 3; ++i) EXPECT_CLOSE(strided[i].grad(), plain[i].grad(), tolerance_of(dtype)) << i;
  }
}

TEST(Attention, RefusesHeadsThatDontGroup) {
  const at::Tensor q = at::randn({1, 3, 4, 8}), k = at::randn({1, 3, 3, 8});
  EXPECT_THROW(causal_attention(q, k, k), Error);
}

}  // namespace

// Compares the node around LibTorch's attention kernels, here the CPU's, with our own attention.

namespace {

// Keeps all results, then hands them back.
class KeepAll : public SavedOutputs {
 public:
  Action next(KeptKind kind, const at::Tensor& /*weight*/) override {
    EXPECT_EQ(kind, KeptKind::Attention);
    return handing_back ? Action::HandBack : Action::Keep;
  }
  void keep(const at::Tensor& output) override { outputs.push_back(output.detach()); }
  at::Tensor hand_back() override { return outputs[next_++]; }
  bool handing_back = false;
  std::vector<at::Tensor> outputs;

 private:
  size_t next_ = 0;
};

struct KernelInputs {
  at::Tensor q = at::randn({2, 12, 4, 8}, at::kDouble).requires_grad_();
  at::Tensor k = at::randn({2, 12, 2, 8}, at::kDouble).requires_grad_();
  at::Tensor v = at::randn({2, 12, 2, 8}, at::kDouble).requires_grad_();
  at::Tensor grad = at::randn({2, 12, 4, 8}, at::kDouble);
  std::vector<at::Tensor> backward(const at::Tensor& out) {
    for (at::Tensor* each : {&q, &k, &v}) each->mutable_grad().reset();
    out.backward(grad);
    return {q.grad(), k.grad(), v.grad()};
  }
};

TEST(CausalAttention, KeptResultsHaveGradients) {
  at::manual_seed(2);
  KernelInputs in;
  KeepAll outputs;
  at::Tensor first, second;
  {
    const ScopedSavedOutputs keeping(&outputs);
    first = causal_attention(in.q, in.k, in.v);
    EXPECT_EQ(outputs.outputs.size(), 2u);
    outputs.handing_back = true;
    second = causal_attention(in.q, in.k, in.v);
  }
  EXPECT_EQ(SavedOutputs::current(), nullptr);
  EXPECT_EQ(second.const_data_ptr(), first.const_data_ptr()) << "not computed again";
  const auto expected = in.backward(first), got = in.backward(second);
  for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(got[i].equal(expected[i])) << i;
}

}  // namespace
}  // namespace titan::ops
