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

// softmax(q k^T / sqrt(D)) v written out, in float64. `others`, [B, 1, S, S]: also hidden; undefined: nothing.
at::Tensor reference(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const at::Tensor& others = {}) {
  const int64_t group = q.size(2) / k.size(2), length = q.size(1);
  const at::Tensor keys = k.repeat_interleave(group, 2).transpose(1, 2),
                   values = v.repeat_interleave(group, 2).transpose(1, 2);
  at::Tensor hidden = at::ones({length, length}, at::kBool).triu(1);
  if (others.defined()) hidden = hidden.logical_or(others);
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

// Tokens of which one in `average` is the token 0, which ends a document.
at::Tensor tokens_in_documents(const SquareSizes& sizes, int64_t average) {
  return at::randint(average, {2, sizes.length}, at::kLong);
}

// TorchTitan's get_document_mask_mod: whether two tokens of a row are in different documents, [B, 1, S, S].
at::Tensor in_other_documents(const at::Tensor& tokens) {
  const at::Tensor is_end = tokens.eq(0);
  is_end.select(1, -1).fill_(true);
  const at::Tensor ended = is_end.to(at::kLong).cumsum(1), numbers = at::zeros_like(ended);
  numbers.narrow(1, 1, tokens.size(1) - 1).copy_(ended.narrow(1, 0, tokens.size(1) - 1));
  return numbers.unsqueeze(2).ne(numbers.unsqueeze(1)).unsqueeze(1);
}

// `spread` makes the scores larger, so that the running maximum changes from block to block. `tokens`: if defined,
// attention stays within their documents.
void expect_equal_to_definition(at::ScalarType dtype, const SquareSizes& sizes, double spread,
                                double tolerance, const at::Tensor& tokens = {}) {
  const auto make = [&](int64_t heads, double scale) {
    return (at::randn({2, sizes.length, heads, sizes.size}) * scale).to(dtype).requires_grad_();
  };
  const at::Tensor q = make(sizes.heads, spread), k = make(sizes.kv_heads, 1), v = make(sizes.kv_heads, 1);
  const at::Tensor grad = at::randn(q.sizes()).to(dtype);
  const at::Tensor out =
      causal_attention(q, k, v, tokens.defined() ? documents_ending_with(0, tokens) : Documents{});
  out.backward(grad);
  std::vector<at::Tensor> wide;
  for (const at::Tensor& t : {q, k, v}) wide.push_back(t.detach().to(at::kDouble).requires_grad_());
  const at::Tensor expected =
      reference(wide[0], wide[1], wide[2], tokens.defined() ? in_other_documents(tokens) : at::Tensor());
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

// Many short documents, some that span blocks, and mostly one per row.
TEST_P(AttentionTest, EqualsItsDefinitionWithinDocuments) {
  for (const int64_t average : {3, 40, 150})
    expect_equal_to_definition(dtype(), sizes(), 1, 2 * tolerance_of(dtype()),
                               tokens_in_documents(sizes(), average));
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

// The scores outside of a document are much larger than those inside.
TEST(AttentionInDocuments, DoesntSeeLargeScoresOfOthers) {
  at::manual_seed(4);
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    const at::Tensor tokens = at::ones({2, 300}, at::kLong);
    tokens.narrow(1, 140, 1).fill_(0);
    expect_equal_to_definition(dtype, {300, 2, 1, 16}, 20, 20 * tolerance_of(dtype), tokens);
  }
}

// In float64, with several tiles: some queries see no key of some tiles.
TEST(AttentionInDocuments, EqualsItsDefinitionOverSeveralTiles) {
  at::manual_seed(5);
  const SquareSizes sizes{600, 2, 1, 8};
  for (const int64_t average : {3, 40, 400})
    expect_equal_to_definition(at::kDouble, sizes, 1, tolerance_of(at::kDouble),
                               tokens_in_documents(sizes, average));
}

// A document's results are those of a sequence that has only its tokens.
TEST(AttentionInDocuments, EqualsSeparateSequences) {
  at::manual_seed(6);
  const at::Tensor tokens = at::ones({1, 200}, at::kLong);
  for (const int64_t end : {0, 9, 130, 131}) tokens[0][end] = 0;
  const at::Tensor q = at::randn({1, 200, 4, 16}), k = at::randn({1, 200, 2, 16}),
                   v = at::randn({1, 200, 2, 16});
  const at::Tensor out = causal_attention(q, k, v, documents_ending_with(0, tokens));
  int64_t first = 0;
  for (const int64_t next : {1, 10, 131, 132, 200}) {
    const auto alone = [&](const at::Tensor& x) { return x.narrow(1, first, next - first); };
    EXPECT_CLOSE(alone(out), causal_attention(alone(q), alone(k), alone(v)), 1e-6) << first;
    first = next;
  }
}

std::vector<int32_t> starts_of(const at::Tensor& tokens) {
  const at::Tensor starts = documents_ending_with(0, tokens).starts;
  const auto* data = starts.const_data_ptr<int32_t>();
  return {data, data + starts.numel()};
}

// A token that ends a document belongs to it, and a row's end is always one.
TEST(Documents, EndWithTheirLastTokenOrTheirRow) {
  const at::Tensor tokens = at::ones({3, 6}, at::kLong);
  EXPECT_EQ(starts_of(tokens), (std::vector<int32_t>{0, 6, 12, 18}));
  for (const auto& [row, column] : {std::pair{0, 0}, {0, 3}, {1, 5}, {2, 1}, {2, 2}}) tokens[row][column] = 0;
  EXPECT_EQ(starts_of(tokens), (std::vector<int32_t>{0, 1, 4, 6, 12, 14, 15, 18}));
  EXPECT_EQ(documents_ending_with(0, tokens).longest, 6);
  EXPECT_EQ(documents_ending_with(0, at::zeros({2, 3}, at::kLong)).longest, 1);
}

TEST(Documents, RefuseOtherTokens) {
  EXPECT_THROW(documents_ending_with(0, at::ones({3}, at::kLong)), Error);
  EXPECT_THROW(documents_ending_with(0, at::ones({3, 2}, at::kInt)), Error);
  EXPECT_THROW(documents_ending_with(0, at::ones({2, 3}, at::kLong).t()), Error);
}

TEST(AttentionInDocuments, RefusesStartsOfOtherBatches) {
  const at::Tensor q = at::randn({2, 6, 2, 8});
  const auto attend = [&](const at::Tensor& starts, int64_t longest) {
    return causal_attention(q, q, q, {starts, longest});
  };
  const auto starts = [](const std::vector<int64_t>& values) { return at::tensor(values).to(at::kInt); };
  EXPECT_NO_THROW(attend(starts({0, 2, 6, 12}), 6));
  EXPECT_THROW(attend(starts({0, 2, 6, 12}).to(at::kLong), 6), Error);
  EXPECT_THROW(attend(starts({0, 12}), 6), Error) << "fewer documents than rows";
  EXPECT_THROW(attend(starts({0, 6, 12}), 7), Error) << "longer than a row";
  EXPECT_THROW(attend(starts({0, 2, 6, 11}), 6), Error) << "of fewer tokens";
  EXPECT_THROW(attend(starts({0, 4, 8, 12}), 4), Error) << "a document in two rows";
}

TEST(Attention, DoesntDependOnTheNumberOfThreads) {
  at::manual_seed(2);
  const int before = at::get_num_threads();
  const at::Tensor q0 = at::randn({3, 130, 4, 16}), k0 = at::randn({3, 130, 2, 16}),
                   v0 = at::randn({3, 130, 2, 16}), tokens = at::randint(30, {3, 130}, at::kLong);
  std::vector<at::Tensor> results;
  for (const int threads : {1, 3}) {
    at::set_num_threads(threads);
    const at::Tensor q = q0.clone().requires_grad_(), k = k0.clone().requires_grad_(),
                     v = v0.clone().requires_grad_();
    const at::Tensor out =
        causal_attention(q, k, v) + causal_attention(q, k, v, documents_ending_with(0, tokens));
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

class KeptAttention : public ::testing::TestWithParam<bool> {};

TEST_P(KeptAttention, HasGradients) {
  at::manual_seed(2);
  KernelInputs in;
  KeepAll outputs;
  at::Tensor first, second;
  const Documents documents =
      GetParam() ? documents_ending_with(0, at::randint(4, {2, 12}, at::kLong)) : Documents{};
  {
    const ScopedSavedOutputs keeping(&outputs);
    first = causal_attention(in.q, in.k, in.v, documents);
    EXPECT_EQ(outputs.outputs.size(), 2u);
    outputs.handing_back = true;
    second = causal_attention(in.q, in.k, in.v, documents);
  }
  EXPECT_EQ(SavedOutputs::current(), nullptr);
  EXPECT_EQ(second.const_data_ptr(), first.const_data_ptr()) << "not computed again";
  const auto expected = in.backward(first), got = in.backward(second);
  for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(got[i].equal(expected[i])) << i;
}

INSTANTIATE_TEST_SUITE_P(Masks, KeptAttention, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "InDocuments" : "Causal"; });

}  // namespace
}  // namespace titan::ops
