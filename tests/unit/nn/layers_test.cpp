#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "tensor/memory.h"
#include "titan/core/error.h"
#include "titan/nn/layers.h"
#include "titan/nn/loss.h"
#include "titan/parallel/parameters.h"
#include "unit/golden.h"

namespace titan::nn {
namespace {

using testing::Golden;
using testing::tolerance_of;

void fill_with(const at::Tensor& parameter, const at::Tensor& values) {
  parameter.variable_data().copy_(values);
}

class Precision : public ::testing::TestWithParam<at::ScalarType> {
 protected:
  at::ScalarType dtype = GetParam();
  Construct construct{.dtype = dtype};
};

TEST_P(Precision, AttentionEqualsPyTorchs) {
  const Golden golden("attention", dtype);
  RotaryEmbedding rotary(RotaryOptions{.head_dim = 8,
                                       .max_positions = 12,
                                       .theta = 500000,
                                       .scaling = RotaryScaling{},
                                       .construct = construct});
  Attention attention(AttentionOptions{.dim = 32, .num_heads = 4, .num_kv_heads = 2, .construct = construct},
                      rotary);
  const std::vector<std::pair<std::string, Linear>> weights{
      {"wq", attention->wq}, {"wk", attention->wk}, {"wv", attention->wv}, {"wo", attention->wo}};
  for (const auto& [name, linear] : weights) fill_with(linear->weight, golden[name]);
  const at::Tensor x = golden.leaf("input");
  const at::Tensor y = attention(x);
  y.backward(golden["grad_output"]);
  EXPECT_CLOSE(y, golden["output"], 2 * tolerance_of(dtype));
  EXPECT_CLOSE(x.grad(), golden["grad_input"], 2 * tolerance_of(dtype));
  for (const auto& [name, linear] : weights)
    EXPECT_CLOSE(linear->weight.grad(), golden["grad_" + name], 2 * tolerance_of(dtype));
}

TEST_P(Precision, FeedForwardEqualsPyTorchs) {
  const Golden golden("feed_forward", dtype);
  FeedForward feed_forward(FeedForwardOptions{.dim = 32, .hidden_dim = 96, .construct = construct});
  const std::vector<std::pair<std::string, Linear>> weights{
      {"w1", feed_forward->w1}, {"w2", feed_forward->w2}, {"w3", feed_forward->w3}};
  for (const auto& [name, linear] : weights) fill_with(linear->weight, golden[name]);
  const at::Tensor x = golden.leaf("input");
  const at::Tensor y = feed_forward(x);
  y.backward(golden["grad_output"]);
  EXPECT_CLOSE(y, golden["output"], 2 * tolerance_of(dtype));
  EXPECT_CLOSE(x.grad(), golden["grad_input"], 2 * tolerance_of(dtype));
  for (const auto& [name, linear] : weights)
    EXPECT_CLOSE(linear->weight.grad(), golden["grad_" + name], 2 * tolerance_of(dtype));
}

TEST_P(Precision, RotaryFrequenciesEqualPyTorchs) {
  const Golden golden("rope", dtype);
  EXPECT_CLOSE(rotary_frequencies(128, 500000, std::nullopt, dtype), golden["frequency.plain"],
               0.3 * tolerance_of(dtype));
  EXPECT_CLOSE(rotary_frequencies(128, 500000, RotaryScaling{}, dtype), golden["frequency.scaled"],
               0.3 * tolerance_of(dtype));
}

INSTANTIATE_TEST_SUITE_P(Types, Precision, ::testing::Values(at::kFloat, at::kDouble));

TEST(RotaryEmbedding, StretchesAsLlama31) {
  const at::Tensor scaled = rotary_frequencies(128, 500000, RotaryScaling{}, at::kDouble);
  const at::Tensor ratio = scaled / rotary_frequencies(128, 500000, std::nullopt, at::kDouble);
  const std::vector<std::pair<int64_t, double>> expected{
      {0, 1}, {28, 1}, {29, 0.8282}, {30, 0.6437}, {32, 0.3711}, {34, 0.1902}, {35, 0.125}, {63, 0.125}};
  for (const auto& [i, value] : expected) EXPECT_NEAR(ratio[i].item<double>(), value, 5e-5) << i;
  EXPECT_NEAR(scaled[10].item<double>(), 1.286874e-1, 1e-7);
  EXPECT_NEAR(scaled[32].item<double>(), 5.248462e-4, 1e-10);
  EXPECT_NEAR(scaled[63].item<double>(), 3.068926e-7, 1e-13);
}

TEST(RotaryEmbedding, HasItsTableAfterMaterialize) {
  RotaryEmbedding rotary(RotaryOptions{.head_dim = 8, .max_positions = 12, .construct = deferred(at::kCPU)});
  const at::Tensor q = at::ones({1, 2, 2, 8}), k = at::ones({1, 2, 1, 8});
  EXPECT_THROW(rotary(q, k), Error);
  rotary->reset_buffers(at::kCPU);
  EXPECT_NO_THROW(rotary(q, k));
  EXPECT_TRUE(rotary->parameters().empty());
}

TEST(Linear, StartsAsPyTorchsDoes) {
  Linear linear(100, 1000, LinearOptions{.bias = true});
  EXPECT_LE(linear->weight.abs().max().item<float>(), 0.1);
  EXPECT_NEAR(linear->weight.var().item<float>(), 0.01 / 3, 1e-4);
  EXPECT_LE(linear->bias.abs().max().item<float>(), 0.1);
}

TEST(Linear, IsDeferredUntilItIsMaterialized) {
  Linear linear(3, 2, LinearOptions{.construct = deferred(at::kCPU)});
  EXPECT_TRUE(is_deferred(linear->weight));
  EXPECT_EQ(linear->weight.sizes(), at::IntArrayRef({2, 3}));
  materialize(linear, 1);
  EXPECT_FALSE(is_deferred(linear->weight));
  EXPECT_EQ(linear(at::ones({4, 3})).sizes(), at::IntArrayRef({4, 2}));
}

struct ZeroProducts : ops::Products {
  at::Tensor forward(const ops::Operand& x, const ops::Operand& w) const override {
    return at::zeros({x.values.size(0), w.values.size(0)});
  }
  at::Tensor grad_input(const ops::Operand& g, const ops::Operand& w) const override {
    return at::zeros({g.values.size(0), w.values.size(1)});
  }
  at::Tensor grad_weight(const ops::Operand& g, const ops::Operand& x) const override {
    return at::zeros({g.values.size(1), x.values.size(1)});
  }
};

TEST(Linear, UsesOtherProducts) {
  FeedForward feed_forward(FeedForwardOptions{
      .dim = 4, .hidden_dim = 8, .gate_init = Init::normal(0, 1), .output_init = Init::normal(0, 1)});
  const at::Tensor x = at::randn({2, 4});
  EXPECT_GT(feed_forward(x).abs().sum().item<float>(), 0);
  set_products(*feed_forward, std::make_shared<ZeroProducts>());
  EXPECT_EQ(feed_forward(x).abs().sum().item<float>(), 0);
}

TEST(LinearCrossEntropy, GivesLogitsOrTheirLoss) {
  LinearCrossEntropy head(8, 13, LossHeadOptions{.init = Init::normal(0, 1)});
  const at::Tensor hidden = at::randn({2, 5, 8}), labels = at::randint(13, {2, 5});
  const at::Tensor logits = head(hidden);
  EXPECT_EQ(logits.sizes(), at::IntArrayRef({2, 5, 13}));
  EXPECT_CLOSE(head(hidden, labels, 20), at::cross_entropy_loss(logits.flatten(0, 1), labels.flatten()) * 0.5,
               1e-5);
}

TEST(LinearCrossEntropy, SharesTheEmbeddingsMatrix) {
  Embedding embedding(13, 8);
  LinearCrossEntropy head(8, 13,
                          LossHeadOptions{.init = Init::normal(0, 1), .tied_weight = embedding->weight});
  const at::Tensor tokens = at::randint(13, {6});
  head(embedding(tokens), tokens, 6).backward();
  EXPECT_TRUE(head->weight.is_same(embedding->weight));
  const at::Tensor leaf = embedding->weight.detach().clone().requires_grad_();
  at::cross_entropy_loss(at::linear(at::embedding(leaf, tokens), leaf), tokens).backward();
  EXPECT_CLOSE(embedding->weight.grad(), leaf.grad(), 1e-5);
  EXPECT_THROW(LinearCrossEntropy(8, 14, LossHeadOptions{.tied_weight = embedding->weight}), Error);
}

TEST(Losses, ListTheKnownNamesForAnUnknownOne) {
  try {
    losses().get("zloss");
    FAIL() << "expected an error";
  } catch (const ConfigError& error) {
    EXPECT_EQ(error.problems(),
              std::vector<std::string>{"unknown loss 'zloss'; known: cross_entropy, label_smoothing, "
                                       "z_loss; did you mean 'z_loss'?"});
  }
}

TEST(Losses, DescribeTheirArguments) {
  EXPECT_TRUE(losses().get("cross_entropy").fields.empty());
  EXPECT_EQ(losses().get("cross_entropy").make(nullptr), nullptr);
  ASSERT_EQ(losses().get("z_loss").fields.size(), 1u);
  EXPECT_EQ(losses().get("z_loss").fields[0].key, "z_weight");
  ASSERT_EQ(losses().get("label_smoothing").fields.size(), 1u);
  EXPECT_EQ(losses().get("label_smoothing").fields[0].key, "epsilon");
}

TEST(Losses, ReplaceTheLossOfEveryHead) {
  LinearCrossEntropy head(8, 13, LossHeadOptions{.init = Init::normal(0, 1)});
  const at::Tensor hidden = at::randn({6, 8}), labels = at::randint(13, {6});
  const LossKind& kind = losses().get("label_smoothing");
  EXPECT_EQ(set_loss(*head, kind.make(kind.make_args().get())), 1);
  EXPECT_CLOSE(head(hidden, labels, 6),
               at::cross_entropy_loss(head(hidden), labels, {}, at::Reduction::Mean, -100, 0.1), 1e-5);
  EXPECT_EQ(set_loss(*head, nullptr), 1);
  EXPECT_CLOSE(head(hidden, labels, 6), at::cross_entropy_loss(head(hidden), labels), 1e-5);
  EXPECT_EQ(set_loss(*Linear(2, 2), nullptr), 0);
}

}  // namespace
}  // namespace titan::nn
