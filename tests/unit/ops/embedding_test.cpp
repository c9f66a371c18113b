#include "titan/ops/embedding.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "titan/core/error.h"
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

struct KeepingSink : GradSink {
  void accept(WeightGrad /*grad*/) override { FAIL() << "an embedding has no product"; }
  void accept(const at::Tensor& grad_OI, const at::Tensor& scale) override {
    kept = scale.defined() ? grad_OI * scale : grad_OI;
  }
  at::Tensor kept;
};

TEST(Embedding, SumsBf16GradientsInFp32) {
  const at::Tensor weight = at::zeros({3, 130}, at::kBFloat16).requires_grad_();
  const auto sink = std::make_shared<KeepingSink>();
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

}  // namespace
}  // namespace titan::ops
