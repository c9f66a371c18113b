#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include "titan/core/error.h"
#include "titan/ops/loss.h"
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

TEST(LinearCrossEntropy, ComputesTheLossAloneWithoutGradients) {
  const HeadCase c;
  at::NoGradGuard no_grad;
  const at::Tensor loss = linear_cross_entropy(c.hidden, c.weight, c.labels, options_for(c.count()));
  const at::Tensor logits = at::linear(c.hidden, c.weight).flatten(0, 1);
  EXPECT_FALSE(loss.requires_grad());
  EXPECT_CLOSE(loss, at::cross_entropy_loss(logits, c.labels.flatten()), 1e-14);
}

struct KeepingSink : GradSink {
  void accept(WeightGrad /*grad*/) override { FAIL() << "the head's gradient is computed already"; }
  void accept(const at::Tensor& grad_OI, const at::Tensor& scale) override {
    kept = scale.defined() ? grad_OI * scale : grad_OI;
  }
  at::Tensor kept;
};

TEST(LinearCrossEntropy, HandsTheWeightGradientToTheSink) {
  const HeadCase c;
  const at::Tensor weight = c.weight.clone().requires_grad_();
  linear_cross_entropy(c.hidden, weight, c.labels, options_for(c.count())).backward();
  const at::Tensor expected = weight.grad().clone();
  weight.mutable_grad() = at::Tensor();
  LossOptions options = options_for(c.count());
  const auto sink = std::make_shared<KeepingSink>();
  options.weight_sink = sink;
  linear_cross_entropy(c.hidden, weight, c.labels, options).backward();
  EXPECT_CLOSE(sink->kept, expected, 1e-14);
  EXPECT_FALSE(weight.grad().defined());
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

}  // namespace
}  // namespace titan::ops
