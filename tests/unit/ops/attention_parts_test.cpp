// Compares attention over parts of the keys, forward and backward, with attention over all keys.

#include "ops/attention.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "memory_meter.h"
#include "titan/core/error.h"
#include "titan/ops/functional.h"
#include "unit/golden.h"

namespace titan::ops {
namespace {

using testing::MemoryMeter;
using testing::tolerance_of;

// Queries are at positions first_query .. of the keys' sequence. In float64.
at::Tensor reference(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t first_query) {
  const int64_t group = q.size(2) / k.size(2);
  const at::Tensor keys = k.repeat_interleave(group, 2).transpose(1, 2),
                   values = v.repeat_interleave(group, 2).transpose(1, 2);
  const at::Tensor hidden = at::ones({q.size(1), k.size(1)}, at::kBool).triu(first_query + 1);
  at::Tensor scores =
      at::matmul(q.transpose(1, 2), keys.transpose(2, 3)) / std::sqrt(static_cast<double>(q.size(3)));
  scores = scores.masked_fill(hidden, -std::numeric_limits<double>::infinity());
  return at::matmul(at::softmax(scores, -1), values).transpose(1, 2);
}

struct Sizes {
  int64_t queries, keys, first_query, heads, kv_heads, size;
};

void PrintTo(const Sizes& s, std::ostream* out) {
  *out << s.queries << " x " << s.keys << " from " << s.first_query << ", " << s.heads << "/" << s.kv_heads
       << " x " << s.size;
}

// The operators' kernels, LibTorch's for any dtype, as on a GPU, or LibTorch's forward before the operators' backward.
enum class Kernels { Chosen, LibTorchs, LibTorchsForward };

// Attention over one part of the keys, forward and backward.
struct PartOfKeys {
  Kernels kernels;
  QueriesKeysValues in;
  int64_t first_query;

  void add_to(AttentionSum sum) const {
    if (kernels == Kernels::Chosen) return attend(sum, in, first_query);
    attend_by_libtorch(sum.out_BSHD, sum.log_sum_exp_BHS, in.q, in.k, in.v, first_query);
  }
  void add_gradients_to(AttentionGradients grads, const at::Tensor& grad,
                        const AttentionSum& all_keys) const {
    if (kernels != Kernels::LibTorchs) return attend_backward(grads, grad, in, all_keys, first_query);
    attend_backward_by_libtorch(grads.q_BSHD, grads.k_BTKD, grads.v_BTKD, grad, in.q, in.k, in.v,
                                all_keys.out_BSHD, all_keys.log_sum_exp_BHS, first_query);
  }
};

struct Part {
  int64_t first_key, num_keys;
};

// The keys from the diagonal on, then the keys before it in three uneven parts.
std::vector<Part> parts_of(const Sizes& sizes) {
  std::vector<Part> parts = {{sizes.first_query, sizes.keys - sizes.first_query}};
  const int64_t before = sizes.first_query;
  for (int64_t first = 0, i = 1; first < before; ++i) {
    const int64_t count = std::min(before - first, before * i / 6 + 1);
    parts.push_back({first, count});
    first += count;
  }
  return parts;
}

struct Inputs {
  at::Tensor q, k, v, grad;
};

// Slices of larger tensors, like a rank's chunks, so rows and batches aren't adjacent.
Inputs random_inputs(const Sizes& sizes, at::ScalarType dtype, double spread) {
  const auto make = [&](int64_t rows, int64_t heads, double scale) {
    return (at::randn({2, rows + 3, heads, sizes.size}) * scale).to(dtype).narrow(1, 2, rows);
  };
  return {make(sizes.queries, sizes.heads, spread), make(sizes.keys, sizes.kv_heads, 1),
          make(sizes.keys, sizes.kv_heads, 1), make(sizes.queries, sizes.heads, 1)};
}

using Case = std::tuple<at::ScalarType, Kernels, Sizes>;

class AttentionParts : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override { at::manual_seed(1); }
};

void expect_parts_equal_whole(const Case& the_case, double spread, double tolerance) {
  const auto& [dtype, kernels, sizes] = the_case;
  const Inputs in = random_inputs(sizes, dtype, spread);
  const auto sum = AttentionSum::of_no_keys(in.q);
  const auto grads = AttentionGradients::zeros(in.q, in.k);
  for (const Part& part : parts_of(sizes)) {
    const auto keys = [&](const at::Tensor& x) { return x.narrow(1, part.first_key, part.num_keys); };
    const PartOfKeys keys_seen{kernels, {in.q, keys(in.k), keys(in.v)}, sizes.first_query - part.first_key};
    keys_seen.add_to(sum);
  }
  const at::Tensor out = sum.out_BSHD.to(dtype);
  for (const Part& part : parts_of(sizes)) {
    const auto keys = [&](const at::Tensor& x) { return x.narrow(1, part.first_key, part.num_keys); };
    const PartOfKeys keys_seen{kernels, {in.q, keys(in.k), keys(in.v)}, sizes.first_query - part.first_key};
    keys_seen.add_gradients_to({grads.q_BSHD, keys(grads.k_BTKD), keys(grads.v_BTKD)}, in.grad,
                               {out, sum.log_sum_exp_BHS});
  }

  std::vector<at::Tensor> wide;
  for (const at::Tensor& t : {in.q, in.k, in.v}) wide.push_back(t.to(at::kDouble).requires_grad_());
  const at::Tensor expected = reference(wide[0], wide[1], wide[2], sizes.first_query);
  expected.backward(in.grad.to(at::kDouble));
  EXPECT_CLOSE(sum.out_BSHD, expected, tolerance);
  EXPECT_CLOSE(grads.q_BSHD, wide[0].grad(), tolerance);
  EXPECT_CLOSE(grads.k_BTKD, wide[1].grad(), tolerance);
  EXPECT_CLOSE(grads.v_BTKD, wide[2].grad(), tolerance);
  EXPECT_EQ(sum.out_BSHD.scalar_type(), dtype == at::kDouble ? at::kDouble : at::kFloat);
}

TEST_P(AttentionParts, EqualAttentionOverAllKeys) {
  expect_parts_equal_whole(GetParam(), 1, 3 * tolerance_of(std::get<0>(GetParam())));
}

// Scores differ a lot between parts, so that later parts dominate earlier ones and vice versa.
TEST_P(AttentionParts, EqualAttentionOverAllKeysWithLargeScores) {
  expect_parts_equal_whole(GetParam(), 8, 12 * tolerance_of(std::get<0>(GetParam())));
}

// A diagonal at the start, far from it, in the middle of a block, or with keys after it that no query sees;
// one query and one key; head sizes that aren't multiples of a vector or a panel.
INSTANTIATE_TEST_SUITE_P(
    All, AttentionParts,
    ::testing::Combine(::testing::Values(at::kFloat, at::kDouble, at::kBFloat16),
                       ::testing::Values(Kernels::Chosen, Kernels::LibTorchs, Kernels::LibTorchsForward),
                       ::testing::Values(Sizes{48, 48, 0, 4, 2, 16}, Sizes{37, 100, 63, 4, 1, 16},
                                         Sizes{1, 1, 0, 2, 2, 6}, Sizes{50, 250, 101, 6, 2, 24},
                                         Sizes{97, 300, 203, 3, 3, 6}, Sizes{130, 260, 130, 2, 1, 80})));

// The fallback on a GPU, over several tiles, and with the log-sum-exp of more keys.
TEST(TiledAttention, EqualsTheKernels) {
  at::manual_seed(4);
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16})
    for (const bool causal : {false, true}) {
      const Inputs in = random_inputs({600, 600, 0, 4, 2, 10}, dtype, 1);
      const QueriesKeysValues heads = heads_first(QueriesKeysValues{in.q, in.k, in.v});
      const KernelResult result = tiled_attention(heads, causal),
                         expected = run_attention_kernel(heads, causal);
      EXPECT_CLOSE(result.out, expected.out, 4 * tolerance_of(dtype));
      EXPECT_CLOSE(result.log_sum_exp, expected.log_sum_exp, 4 * tolerance_of(dtype));
      const KernelResult more_keys{expected.out, expected.log_sum_exp + 1};
      const at::Tensor grad = heads_first(in.grad);
      const QueriesKeysValues grads = tiled_attention_backward(grad, heads, more_keys, causal),
                              wanted = run_attention_kernel_backward(grad, heads, more_keys, causal);
      EXPECT_CLOSE(grads.q, wanted.q, 4 * tolerance_of(dtype));
      EXPECT_CLOSE(grads.k, wanted.k, 4 * tolerance_of(dtype));
      EXPECT_CLOSE(grads.v, wanted.v, 4 * tolerance_of(dtype));
    }
}

// Peak bytes during and after the kernel, beyond its inputs.
int64_t peak_of_tiles(int64_t length, bool causal) {
  const Inputs in = random_inputs({length, length, 0, 1, 1, 8}, at::kFloat, 1);
  const QueriesKeysValues heads = heads_first(QueriesKeysValues{in.q, in.k, in.v});
  const MemoryMeter meter;
  const KernelResult result = tiled_attention(heads, causal);
  tiled_attention_backward(heads_first(in.grad), heads, result, causal);
  return meter.peak();
}

// Tiles have 256 keys for any sequence, so a few of them are a small part of the whole matrix of scores, and
// grow only linearly with the sequence.
TEST(TiledAttention, NeverStoresAllScores) {
  for (const bool causal : {false, true}) {
    const int64_t half = peak_of_tiles(2048, causal), whole = peak_of_tiles(4096, causal);
    EXPECT_LE(static_cast<double>(whole), 2.1 * static_cast<double>(half)) << causal;
    const int64_t rows = 2, bytes_of_scores = rows * 4096 * 4096 * 4;
    EXPECT_LE(whole, bytes_of_scores / 2) << causal;
  }
}

// One call with a mask that isn't causal but masks some keys, and more query positions than keys.
TEST(AttentionPartsMask, CountsFromTheFirstQuery) {
  at::manual_seed(2);
  for (const int64_t first_query : {0, 1, 47, 48, 60, 149, 150, 1000}) {
    const Inputs in = random_inputs({100, 150, first_query, 2, 1, 16}, at::kFloat, 1);
    const auto sum = AttentionSum::of_no_keys(in.q);
    attend(sum, {in.q, in.k, in.v}, first_query);
    const auto wide = [](const at::Tensor& x) { return x.to(at::kDouble); };
    EXPECT_CLOSE(sum.out_BSHD, reference(wide(in.q), wide(in.k), wide(in.v), first_query), 3e-6)
        << first_query;
  }
}

// Rows of a sum are views, to which the attention of a rank's second chunk is added.
TEST(AttentionPartsMask, FillsRowsOfASumInPlace) {
  at::manual_seed(3);
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    const Inputs in = random_inputs({40, 60, 60, 4, 2, 16}, dtype, 1);
    const auto whole = AttentionSum::of_no_keys(in.q), halves = AttentionSum::of_no_keys(in.q);
    attend(whole, {in.q, in.k, in.v}, 60);
    for (const int64_t first : {0, 20})
      attend(halves.rows(first, 20), {in.q.narrow(1, first, 20), in.k, in.v}, 60);
    EXPECT_CLOSE(halves.out_BSHD, whole.out_BSHD, tolerance_of(dtype));
    EXPECT_CLOSE(halves.log_sum_exp_BHS, whole.log_sum_exp_BHS, tolerance_of(dtype));
  }
}

TEST(AttentionPartsMask, RefusesQueriesThatSeeNothing) {
  const Inputs in = random_inputs({4, 4, 0, 2, 2, 8}, at::kFloat, 1);
  EXPECT_THROW(attend(AttentionSum::of_no_keys(in.q), {in.q, in.k, in.v}, -1), Error);
}

TEST(AttentionPartsMask, RunsOnMeta) {
  const at::Tensor q = at::empty({1, 8, 4, 16}, at::TensorOptions(at::kBFloat16).device(at::kMeta));
  const at::Tensor k = at::empty({1, 8, 2, 16}, q.options());
  const auto sum = AttentionSum::of_no_keys(q);
  attend(sum, {q, k, k}, 0);
  EXPECT_EQ(sum.out_BSHD.scalar_type(), at::kFloat);
  attend_backward(AttentionGradients::zeros(q, k), q, {q, k, k}, {q, sum.log_sum_exp_BHS}, 0);
}

}  // namespace
}  // namespace titan::ops
