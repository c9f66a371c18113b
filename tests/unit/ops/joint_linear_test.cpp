#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "titan/core/error.h"
#include "titan/nn/layers.h"
#include "titan/ops/linear.h"
#include "unit/golden.h"

namespace titan::ops {
namespace {

constexpr double kTolerance = 1e-12;

at::Tensor drawn(at::IntArrayRef sizes) { return at::randn(sizes, at::kDouble).requires_grad_(); }

// Simulates both ranks of a sequence cut into two equal halves, where a peer would send the same as this
// rank.
class TwinExchange final : public SequenceExchange {
 public:
  explicit TwinExchange(bool at_once = false) : at_once_(at_once) {}
  int count() const override { return 2; }
  bool at_once() const override { return at_once_; }
  at::Tensor gather_whole(const at::Tensor& part) const override {
    ++gathers;
    return at::cat({part, part}, 1);
  }
  at::Tensor scatter_whole(const at::Tensor& summand) const override {
    const auto halves = summand.chunk(2, 1);
    return halves[0] + halves[1];
  }

  class TwinGather final : public Gather {
   public:
    explicit TwinGather(at::Tensor part) : part_(std::move(part)) {}
    int next() override { return next_ < 2 ? next_++ : -1; }
    at::Tensor part(int /*rank*/) const override { return part_; }
    at::Tensor whole() const override { return at::cat({part_, part_}, 1); }

   private:
    at::Tensor part_;
    int next_ = 0;
  };
  class TwinScatter final : public Scatter {
   public:
    int next() override { return given_.size() < 2 ? static_cast<int>(given_.size()) : -1; }
    void give(const at::Tensor& summand) override { given_.push_back(summand); }
    at::Tensor finish() override { return given_[0] + given_[1]; }

   private:
    std::vector<at::Tensor> given_;
  };
  std::unique_ptr<Gather> gather(const at::Tensor& part) const override {
    ++gathers;
    return std::make_unique<TwinGather>(part);
  }
  std::unique_ptr<Scatter> scatter() const override { return std::make_unique<TwinScatter>(); }

  mutable int gathers = 0;

 private:
  bool at_once_;
};

struct JointCase {
  at::Tensor x = drawn({2, 3, 5});
  std::vector<at::Tensor> weights{drawn({4, 5}), drawn({7, 5}), drawn({2, 5})};
  std::vector<SharedProducts> products{weights.size(), default_products()};

  std::vector<SinkedWeight> sinked() const {
    std::vector<SinkedWeight> result;
    for (const at::Tensor& weight : weights) result.push_back({weight, nullptr});
    return result;
  }
  std::vector<at::Tensor> apart(const at::Tensor& input) const {
    std::vector<at::Tensor> outputs;
    for (const at::Tensor& weight : weights) outputs.push_back(linear(input, weight, {}, products[0]));
    return outputs;
  }
  // Returns x's gradient, then the weights' gradients, and resets them.
  std::vector<at::Tensor> take_gradients() {
    std::vector<at::Tensor> all{x.grad()};
    x.mutable_grad().reset();
    for (at::Tensor& weight : weights) {
      all.push_back(weight.grad());
      weight.mutable_grad().reset();
    }
    return all;
  }
};

at::Tensor loss_of(const std::vector<at::Tensor>& outputs, size_t left_out) {
  at::Tensor loss = at::zeros({}, at::kDouble);
  for (size_t i = 0; i < outputs.size(); ++i)
    if (i != left_out) loss = loss + outputs[i].pow(2).sum() * static_cast<double>(i + 1);
  return loss;
}

void expect_equal(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(got[i].defined(), expected[i].defined()) << i;
    if (got[i].defined()) {
      EXPECT_CLOSE(got[i], expected[i], kTolerance);
    }
  }
}

// Index 3: no output is left out.
class JointLinears : public ::testing::TestWithParam<size_t> {};

TEST_P(JointLinears, EqualSeparateLayers) {
  JointCase c;
  const auto apart = c.apart(c.x);
  loss_of(apart, GetParam()).backward();
  const auto expected = c.take_gradients();
  const auto joint = joint_linears(c.x, c.sinked(), c.products);
  EXPECT_EQ(joint[0].grad_fn(), joint[2].grad_fn());
  expect_equal(joint, apart);
  loss_of(joint, GetParam()).backward();
  expect_equal(c.take_gradients(), expected);
}

TEST_P(JointLinears, GatherASequenceOnce) {
  JointCase c;
  const at::Tensor whole = at::cat({c.x, c.x}, 1);
  const auto apart = c.apart(whole);
  loss_of(apart, GetParam()).backward();
  const auto expected = c.take_gradients();
  for (const bool at_once : {false, true}) {
    const auto exchange = std::make_shared<const TwinExchange>(at_once);
    const auto gathered = gathered_linears(c.x, c.sinked(), c.products, exchange);
    EXPECT_EQ(exchange->gathers, 1);
    expect_equal(gathered, apart);
    loss_of(gathered, GetParam()).backward();
    expect_equal(c.take_gradients(), expected);
  }
}

INSTANTIATE_TEST_SUITE_P(LeavingOut, JointLinears, ::testing::Values(0, 1, 2, 3));

// Both ranks' summands are equal here, and so are the halves' sums: each rank gets x W^T of one half plus
// that of the other.
TEST(ScatteredLinear, SumsPartsOfTheSequence) {
  const at::Tensor x = drawn({2, 6, 5}), weight = drawn({4, 5});
  const at::Tensor whole = linear(x, weight, {}, default_products());
  const at::Tensor expected = whole.narrow(1, 0, 3) + whole.narrow(1, 3, 3);
  const auto expected_grads = torch::autograd::grad({expected.pow(2).sum()}, {x, weight});
  for (const bool at_once : {false, true}) {
    const auto exchange = std::make_shared<const TwinExchange>(at_once);
    const at::Tensor sum = scattered_linear(x, {weight, nullptr}, default_products(), exchange);
    EXPECT_CLOSE(sum, expected, kTolerance);
    const auto grads = torch::autograd::grad({sum.pow(2).sum()}, {x, weight});
    EXPECT_CLOSE(grads[0], expected_grads[0], kTolerance);
    EXPECT_CLOSE(grads[1], expected_grads[1], kTolerance);
  }
}

TEST(ScatteredLinear, RefusesAnUnevenSequence) {
  EXPECT_THROW(scattered_linear(drawn({1, 3, 5}), {drawn({4, 5}), nullptr}, default_products(),
                                std::make_shared<const TwinExchange>()),
               Error);
}

TEST(JointLinears, RecordNothingWithoutGradients) {
  JointCase c;
  at::NoGradGuard no_grad;
  for (const at::Tensor& output : joint_linears(c.x, c.sinked(), c.products))
    EXPECT_FALSE(output.requires_grad());
}

TEST(JointLinears, GiveFrozenWeightsNoGradient) {
  JointCase c;
  c.weights[1].set_requires_grad(false);
  loss_of(joint_linears(c.x, c.sinked(), c.products), 3).backward();
  const auto gradients = c.take_gradients();
  EXPECT_TRUE(gradients[1].defined());
  EXPECT_FALSE(gradients[2].defined());
}

class CountingHook : public nn::CallHook {
 public:
  void pre_forward(nn::HookHost& /*host*/, const nn::TensorRefs& /*inputs*/) override { ++calls; }
  int calls = 0;
};

TEST(Linears, AreOneNodeUnlessALayerIsHooked) {
  const nn::Linear first(5, 4), second(5, 7);
  const at::Tensor x = at::randn({3, 5}).requires_grad_();
  auto results = nn::linears(x, {&first, &second});
  EXPECT_EQ(results[0].grad_fn(), results[1].grad_fn());
  const auto hook = std::make_shared<CountingHook>();
  second.ptr()->label_hook = hook;
  results = nn::linears(x, {&first, &second});
  EXPECT_NE(results[0].grad_fn(), results[1].grad_fn());
  EXPECT_EQ(hook->calls, 1);
}

}  // namespace
}  // namespace titan::ops
