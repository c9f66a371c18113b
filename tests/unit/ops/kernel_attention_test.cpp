// The node around LibTorch's attention kernels, here the CPU's, against our own attention.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "ops/recorded_attention.h"
#include "titan/ops/attention.h"

namespace titan::ops {
namespace {

// Keeps everything, then hands it back.
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

TEST(KernelAttention, EqualsOurs) {
  at::manual_seed(1);
  KernelInputs in;
  const at::Tensor expected = causal_attention(in.q, in.k, in.v);
  const auto expected_grads = in.backward(expected);
  const at::Tensor out = kernel_attention(in.q, in.k, in.v);
  EXPECT_TRUE(at::allclose(out, expected, 1e-10, 1e-12));
  const auto grads = in.backward(out);
  for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(at::allclose(grads[i], expected_grads[i], 1e-9, 1e-11)) << i;
}

TEST(KernelAttention, WhatWasKeptHasItsGradients) {
  at::manual_seed(2);
  KernelInputs in;
  KeepAll outputs;
  at::Tensor first, second;
  {
    const ScopedSavedOutputs keeping(&outputs);
    first = kernel_attention(in.q, in.k, in.v);
    EXPECT_EQ(outputs.outputs.size(), 2u);
    outputs.handing_back = true;
    second = kernel_attention(in.q, in.k, in.v);
  }
  EXPECT_EQ(SavedOutputs::current(), nullptr);
  EXPECT_EQ(second.const_data_ptr(), first.const_data_ptr()) << "not computed again";
  const auto expected = in.backward(first), got = in.backward(second);
  for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(got[i].equal(expected[i])) << i;
}

}  // namespace
}  // namespace titan::ops
