#include <gtest/gtest.h>

#include <barrier>
#include <cmath>
#include <thread>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include "titan/core/error.h"
#include "titan/nn/layers.h"
#include "titan/ops/loss.h"
#include "titan/tensor/placement.h"
#include "unit/golden.h"

namespace titan::ops {
namespace {

using testing::Golden;
using testing::tolerance_of;

LossOptions options_for(int64_t count, int64_t chunk_bytes = 1 << 20) {
  return {.global_valid_tokens = count, .chunk_bytes = chunk_bytes, .products = default_products()};
}

struct HeadCase {
  at::Tensor hidden = at::randn({3, 11, 24}, at::kDouble), weight = at::randn({29, 24}, at::kDouble);
  at::Tensor labels = at::randint(29, {3, 11});
  HeadCase() { labels[1].fill_(kIgnoredLabel); }
  int64_t count() const { return labels.ne(kIgnoredLabel).sum().item<int64_t>(); }
};

TEST(LinearCrossEntropy, EqualsPyTorchs) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    const Golden golden("cross_entropy", dtype);
    const at::Tensor hidden = golden.leaf("hidden"), weight = golden.leaf("weight");
    const at::Tensor loss =
        linear_cross_entropy(hidden, weight, golden["labels"], options_for(golden["count"].item<int64_t>()));
    loss.backward();
    EXPECT_EQ(loss.scalar_type(), dtype);
    EXPECT_CLOSE(loss, golden["output"], tolerance_of(dtype));
    EXPECT_CLOSE(hidden.grad(), golden["grad_hidden"], tolerance_of(dtype));
    EXPECT_CLOSE(weight.grad(), golden["grad_weight"], tolerance_of(dtype));
  }
}

TEST(LinearCrossEntropy, DoesntDependOnTheChunks) {
  const HeadCase c;
  std::vector<at::Tensor> losses, grads;
  for (const int64_t chunk_bytes : {int64_t{1}, int64_t{29 * 8 * 4}, int64_t{1} << 30}) {
    const at::Tensor hidden = c.hidden.clone().requires_grad_(), weight = c.weight.clone().requires_grad_();
    losses.push_back(linear_cross_entropy(hidden, weight, c.labels, options_for(c.count(), chunk_bytes)));
    losses.back().backward();
    grads.push_back(at::cat({hidden.grad().flatten(), weight.grad().flatten()}));
  }
  for (size_t i = 1; i < losses.size(); ++i) {
    EXPECT_CLOSE(losses[i], losses[0], 1e-14);
    EXPECT_CLOSE(grads[i], grads[0], 1e-14);
  }
}

TEST(LinearCrossEntropy, ScalesByTheIncomingGradient) {
  const HeadCase c;
  const at::Tensor hidden = c.hidden.clone().requires_grad_(), weight = c.weight.clone().requires_grad_();
  const auto grads = [&](double factor) {
    const at::Tensor loss = linear_cross_entropy(hidden, weight, c.labels, options_for(c.count()));
    return torch::autograd::grad({loss * factor}, {hidden, weight});
  };
  const auto once = grads(1), thrice = grads(3);
  EXPECT_CLOSE(thrice[0], once[0] * 3, 1e-14);
  EXPECT_CLOSE(thrice[1], once[1] * 3, 1e-14);
}

TEST(LinearCrossEntropy, ComputesInBf16CloseToExact) {
  const HeadCase c;
  const at::Tensor hidden = c.hidden.to(at::kBFloat16).requires_grad_(),
                   weight = c.weight.to(at::kBFloat16).requires_grad_();
  const at::Tensor loss = linear_cross_entropy(hidden, weight, c.labels, options_for(c.count()));
  loss.backward();
  const at::Tensor wide_hidden = c.hidden.clone().requires_grad_(),
                   wide_weight = c.weight.clone().requires_grad_();
  const at::Tensor expected =
      linear_cross_entropy(wide_hidden, wide_weight, c.labels, options_for(c.count()));
  expected.backward();
  EXPECT_EQ(loss.scalar_type(), at::kFloat);
  EXPECT_CLOSE(loss, expected, 5e-3);
  EXPECT_CLOSE(hidden.grad(), wide_hidden.grad(), 3e-2);
  EXPECT_CLOSE(weight.grad(), wide_weight.grad(), 3e-2);
}

TEST(LinearCrossEntropy, IsZeroWithoutValidTokens) {
  const HeadCase c;
  const at::Tensor hidden = c.hidden.clone().requires_grad_(), weight = c.weight.clone().requires_grad_();
  const at::Tensor labels = at::full_like(c.labels, kIgnoredLabel);
  const at::Tensor loss = linear_cross_entropy(hidden, weight, labels, options_for(0));
  loss.backward();
  EXPECT_EQ(loss.item<double>(), 0);
  EXPECT_EQ(hidden.grad().abs().sum().item<double>(), 0);
  EXPECT_EQ(weight.grad().abs().sum().item<double>(), 0);
}

// The count of a CUDA graph, which is a tensor, gives the same bits as a number.
TEST(LinearCrossEntropy, TakesTheCountFromTheDevice) {
  const HeadCase c;
  for (const at::ScalarType dtype : {at::kBFloat16, at::kFloat, at::kDouble}) {
    const at::Tensor inverse = at::zeros({}, at::kDouble);
    for (const int64_t count : {int64_t{7}, c.count(), int64_t{1'000'003}}) {
      const auto loss_and_gradients = [&](const ValidTokens& tokens) {
        const at::Tensor hidden = c.hidden.to(dtype).requires_grad_(),
                         weight = c.weight.to(dtype).requires_grad_();
        LossOptions options = options_for(1);
        options.global_valid_tokens = tokens;
        const at::Tensor loss = linear_cross_entropy(hidden, weight, c.labels, options);
        loss.backward();
        return std::vector{loss.detach(), hidden.grad(), weight.grad()};
      };
      inverse.fill_(1.0 / static_cast<double>(count));
      const auto expected = loss_and_gradients(count),
                 got = loss_and_gradients(ValidTokens::on_device(inverse));
      for (size_t i = 0; i < expected.size(); ++i) {
        EXPECT_EQ(got[i].scalar_type(), expected[i].scalar_type());
        EXPECT_TRUE(at::equal(got[i], expected[i])) << dtype << " " << count << " " << i;
      }
    }
  }
}

// Also of a model that sums its losses in 16 bits.
TEST(ValidTokens, DivideWithTheSameBitsFromTheDevice) {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf, at::kFloat, at::kDouble}) {
    const at::Tensor sums = at::arange(1, 400).to(dtype), inverse = at::full({}, 1.0 / 1'001, at::kDouble);
    const at::Tensor given = sums / ValidTokens(1'001), from_device = sums / ValidTokens::on_device(inverse);
    EXPECT_EQ(from_device.scalar_type(), dtype);
    EXPECT_TRUE(at::equal(given, from_device)) << dtype;
  }
}

TEST(LinearCrossEntropy, RefusesANegativeCount) { EXPECT_THROW(options_for(-1), Error); }

TEST(LinearCrossEntropy, ComputesTheLossAloneWithoutGradients) {
  const HeadCase c;
  at::NoGradGuard no_grad;
  const at::Tensor loss = linear_cross_entropy(c.hidden, c.weight, c.labels, options_for(c.count()));
  const at::Tensor logits = at::linear(c.hidden, c.weight).flatten(0, 1);
  EXPECT_FALSE(loss.requires_grad());
  EXPECT_CLOSE(loss, at::cross_entropy_loss(logits, c.labels.flatten()), 1e-14);
}

struct LossSink : GradSink {
  void accept(WeightGrad /*grad*/) override { FAIL() << "the head computes its gradient itself"; }
  void accept(const at::Tensor& grad_OI, const at::Tensor& scale) override {
    kept = scale.defined() ? grad_OI * scale : grad_OI;
  }
  at::Tensor kept;
};

TEST(LinearCrossEntropy, GivesTheWeightGradientToTheSink) {
  const HeadCase c;
  const at::Tensor weight = c.weight.clone().requires_grad_();
  linear_cross_entropy(c.hidden, weight, c.labels, options_for(c.count())).backward();
  const at::Tensor expected = weight.grad().clone();
  weight.mutable_grad() = at::Tensor();
  LossOptions options = options_for(c.count());
  const auto sink = std::make_shared<LossSink>();
  options.weight_sink = sink;
  linear_cross_entropy(c.hidden, weight, c.labels, options).backward();
  EXPECT_CLOSE(sink->kept, expected, 1e-14);
  EXPECT_FALSE(weight.grad().defined());
}

/// Lends two blocks of rows.
struct LendingSink : GradSink {
  void accept(WeightGrad /*grad*/) override { FAIL() << "the head computes its gradient itself"; }
  void accept(const at::Tensor& /*grad*/, const at::Tensor& /*scale*/) override {
    FAIL() << "the head has memory of its own";
  }
  std::vector<at::Tensor> lend(at::ScalarType dtype) override {
    lent = {at::full({20, 24}, NAN, dtype), at::full({9, 24}, NAN, dtype)};
    return lent;
  }
  void accept_lent(const std::vector<at::Tensor>& blocks, const at::Tensor& scale) override {
    EXPECT_TRUE(blocks[0].is_same(lent[0]));
    kept = at::cat(blocks) * scale;
  }
  std::vector<at::Tensor> lent;
  at::Tensor kept;
};

TEST(LinearCrossEntropy, SumsTheWeightGradientInLentMemory) {
  const HeadCase c;
  const at::Tensor weight = c.weight.clone().requires_grad_();
  linear_cross_entropy(c.hidden, weight, c.labels, options_for(c.count())).backward();
  LossOptions options = options_for(c.count());
  const auto sink = std::make_shared<LendingSink>();
  options.weight_sink = sink;
  linear_cross_entropy(c.hidden, weight, c.labels, options).backward();
  EXPECT_CLOSE(sink->kept, weight.grad(), 1e-14);
}

TEST(LinearCrossEntropy, RefusesWrongLabels) {
  HeadCase c;
  EXPECT_THROW(linear_cross_entropy(c.hidden, c.weight, c.labels.narrow(1, 0, 3), options_for(1)), Error);
  EXPECT_THROW(linear_cross_entropy(c.hidden, c.weight, c.labels.to(at::kInt), options_for(1)), Error);
  c.labels[0][0] = 29;
  EXPECT_THROW(linear_cross_entropy(c.hidden, c.weight, c.labels, options_for(1)), Error);
  c.labels[0][0] = -1;
  EXPECT_THROW(linear_cross_entropy(c.hidden, c.weight, c.labels, options_for(1)), Error);
}

// ---- other losses (the formulas in nn/loss.cpp), compared with PyTorch's operations in float64

struct LossCase {
  const char* name;
  std::shared_ptr<const TokenLoss> loss;
  std::function<at::Tensor(const at::Tensor& logits, const at::Tensor& labels)> sum;  // over valid tokens
};

void PrintTo(const LossCase& value, std::ostream* out) { *out << value.name; }

std::shared_ptr<const TokenLoss> registered_loss(const char* name, const char* key, double value) {
  const nn::LossKind& kind = nn::losses().get(name);
  const auto args = kind.make_args();
  for (const config::FieldInfo& field : kind.fields)
    if (field.key == key) field.set(args.get(), config::Value(value));
  return kind.make(args.get());
}

at::Tensor smoothed(const at::Tensor& logits, const at::Tensor& labels, double epsilon) {
  return at::cross_entropy_loss(logits, labels, /*weight=*/{}, at::Reduction::Sum, kIgnoredLabel, epsilon);
}

const std::vector<LossCase>& loss_cases() {
  static const std::vector<LossCase> cases = {
      {"z_loss", registered_loss("z_loss", "z_weight", 0.3),
       [](const at::Tensor& logits, const at::Tensor& labels) {
         const at::Tensor squares = at::logsumexp(logits, {1}).square();
         return smoothed(logits, labels, 0) + 0.3 * squares.masked_fill(labels.eq(kIgnoredLabel), 0).sum();
       }},
      {"label_smoothing", registered_loss("label_smoothing", "epsilon", 0.2),
       [](const at::Tensor& logits, const at::Tensor& labels) { return smoothed(logits, labels, 0.2); }}};
  return cases;
}

class Losses : public ::testing::TestWithParam<LossCase> {};

// The kernels (float32, bf16, float64) and the composites (float16).
TEST_P(Losses, EqualTheirFormulaAndItsGradients) {
  const HeadCase c;
  const at::Tensor hidden = c.hidden.clone().requires_grad_(), weight = c.weight.clone().requires_grad_();
  const at::Tensor expected =
      GetParam().sum(at::linear(hidden, weight).flatten(0, 1), c.labels.flatten()) / c.count();
  expected.backward();
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf})
    for (const int64_t chunk_bytes : {int64_t{29 * 2 * 4}, int64_t{1} << 30}) {
      const bool is_16bit = c10::elementSize(dtype) == 2;
      const double tolerance = dtype == at::kDouble ? 1e-13 : is_16bit ? 3e-2 : 1e-5;
      const at::Tensor h = c.hidden.to(dtype).clone().requires_grad_();
      const at::Tensor w = c.weight.to(dtype).clone().requires_grad_();
      LossOptions options = options_for(c.count(), chunk_bytes);
      options.loss = GetParam().loss;
      const at::Tensor loss = linear_cross_entropy(h, w, c.labels, options);
      loss.backward();
      EXPECT_CLOSE(loss, expected, tolerance) << dtype;
      EXPECT_CLOSE(h.grad(), hidden.grad(), tolerance) << dtype;
      EXPECT_CLOSE(w.grad(), weight.grad(), tolerance) << dtype;
    }
}

TEST_P(Losses, RefuseWrongLabels) {
  HeadCase c;
  c.labels[0][0] = 29;
  LossOptions options = options_for(1);
  options.loss = GetParam().loss;
  EXPECT_THROW(linear_cross_entropy(c.hidden, c.weight, c.labels, options), Error);
}

// Threads as ranks, each of which has some rows of the vocabulary.
class ThreadParts final : public RankParts {
 public:
  struct Board {
    explicit Board(int count) : barrier(count), sent(static_cast<size_t>(count)) {}
    std::barrier<> barrier;
    std::vector<at::Tensor> sent;
    int num_exchanges = 0;
  };
  ThreadParts(Board& board, int index) : board_(board), index_(index) {}
  int index() const override { return index_; }
  int count() const override { return static_cast<int>(board_.sent.size()); }
  void all_gather(const at::Tensor& out, const at::Tensor& in, const char* phase) const override {
    EXPECT_STREQ(phase, "tp::vocabulary");
    if (index_ == 0) ++board_.num_exchanges;  // one thread alone writes it
    board_.sent[static_cast<size_t>(index_)] = in;
    board_.barrier.arrive_and_wait();
    for (int i = 0; i < count(); ++i) out[i].copy_(board_.sent[static_cast<size_t>(i)]);
    board_.barrier.arrive_and_wait();
  }

 private:
  Board& board_;
  int index_;
};

struct RankResult {
  at::Tensor loss, grad_hidden, grad_weight;
};

constexpr int64_t kChunkBytes = 29 * 8 * 5;

// Each chunk of tokens takes one exchange: of its statistics, or of its logits.
int64_t num_exchanges(const HeadCase& c, int count, bool gather_logits) {
  const int64_t vocabulary = c.weight.size(0), tokens = c.labels.numel(),
                columns = gather_logits ? vocabulary : padded_chunk_length(vocabulary, count),
                rows = kChunkBytes / (8 * columns);
  return (tokens + rows - 1) / rows;
}

std::vector<RankResult> results_of_ranks(const HeadCase& c, const std::shared_ptr<const TokenLoss>& loss,
                                         int count, bool gather_logits) {
  ThreadParts::Board board(count);
  std::vector<RankResult> results(static_cast<size_t>(count));
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < count; ++rank)
    ranks.emplace_back([&, rank] {
      const Chunk rows = chunk_of(c.weight.size(0), count, rank);
      const at::Tensor hidden = c.hidden.clone().requires_grad_(),
                       weight = c.weight.narrow(0, rows.offset, rows.length).clone().requires_grad_();
      LossOptions options = options_for(c.count(), kChunkBytes);
      options.loss = loss;
      options.part = {.first = rows.offset,
                      .size = c.weight.size(0),
                      .parts = std::make_shared<ThreadParts>(board, rank),
                      .gather_logits = gather_logits};
      const at::Tensor result = linear_cross_entropy(hidden, weight, c.labels, options);
      result.backward();
      results[static_cast<size_t>(rank)] = {result.detach(), hidden.grad(), weight.grad()};
    });
  for (std::thread& rank : ranks) rank.join();
  EXPECT_EQ(board.num_exchanges, num_exchanges(c, count, gather_logits));
  return results;
}

void expect_parts_equal_whole(const HeadCase& c, const std::shared_ptr<const TokenLoss>& loss, int count) {
  const at::Tensor hidden = c.hidden.clone().requires_grad_(), weight = c.weight.clone().requires_grad_();
  LossOptions options = options_for(c.count());
  options.loss = loss;
  const at::Tensor expected = linear_cross_entropy(hidden, weight, c.labels, options);
  expected.backward();
  for (const bool gather_logits : {false, true}) {
    const auto results = results_of_ranks(c, loss, count, gather_logits);
    at::Tensor grad_hidden = at::zeros_like(hidden);
    std::vector<at::Tensor> grad_weight;
    for (const RankResult& result : results) {
      EXPECT_TRUE(result.loss.equal(results[0].loss));
      grad_hidden = grad_hidden + result.grad_hidden;
      grad_weight.push_back(result.grad_weight);
    }
    EXPECT_CLOSE(results[0].loss, expected, 1e-13) << gather_logits;
    EXPECT_CLOSE(grad_hidden, hidden.grad(), 1e-13) << gather_logits;
    EXPECT_CLOSE(at::cat(grad_weight), weight.grad(), 1e-13) << gather_logits;
  }
}

TEST_P(Losses, AreTheSameForASplitVocabulary) { expect_parts_equal_whole(HeadCase(), GetParam().loss, 3); }

TEST_P(Losses, AllowPartsWithoutTokens) {
  HeadCase c;
  c.weight = at::randn({2, 24}, at::kDouble);
  c.labels = at::randint(2, {3, 11});
  expect_parts_equal_whole(c, GetParam().loss, 3);
}

INSTANTIATE_TEST_SUITE_P(All, Losses, ::testing::ValuesIn(loss_cases()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(LinearCrossEntropy, IsTheSameForASplitVocabulary) { expect_parts_equal_whole(HeadCase(), nullptr, 3); }

}  // namespace
}  // namespace titan::ops
