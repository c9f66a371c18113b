// Which kernels run. The meta kernels that PyTorch implements in Python equal the CPU's: sizes, dtypes and strides.

#include <gtest/gtest.h>
#include <vector>

#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/_scaled_mm.h>
#include <ATen/ops/embedding_dense_backward.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include "ops/operators.h"
#include "ops/reference_kernels.h"
#include "titan/ops/functional.h"

namespace titan::ops {
namespace {

at::Tensor on_meta(const at::Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}

void expect_alike(const at::Tensor& meta, const at::Tensor& cpu) {
  EXPECT_TRUE(meta.is_meta());
  EXPECT_EQ(meta.sizes(), cpu.sizes());
  EXPECT_EQ(meta.strides(), cpu.strides());
  EXPECT_EQ(meta.scalar_type(), cpu.scalar_type());
}

TEST(ReferenceKernels, AreTheCompositesWhileTheObjectLives) {
  const at::Tensor x = at::randn({3, 40}), up = at::randn({3, 40});
  const at::Tensor composite = composite::swiglu(x, up), kernel = swiglu(x, up);
  ASSERT_FALSE(kernel.equal(composite)) << "the kernel's bits tell which one ran";
  {
    const ReferenceKernels reference;
    EXPECT_TRUE(swiglu(x, up).equal(composite));
  }
  EXPECT_TRUE(swiglu(x, up).equal(kernel));
}

TEST(MetaKernels, EqualTheCpusForEmbeddings) {
  const at::Tensor table = at::randn({7, 5}), rows = at::ones({4}, at::kLong);
  expect_alike(at::index_select(on_meta(table), 0, on_meta(rows)), at::index_select(table, 0, rows));
  expect_alike(at::index_select(on_meta(table), 1, on_meta(rows)), at::index_select(table, 1, rows));
  const at::Tensor grad = at::randn({2, 4, 5}), tokens = at::ones({2, 4}, at::kLong);
  expect_alike(at::embedding_dense_backward(on_meta(grad), on_meta(tokens), 7, -1, false),
               at::embedding_dense_backward(grad, tokens, 7, -1, false));
}

TEST(MetaKernels, EqualTheCpusForWhere) {
  const at::Tensor condition = at::ones({3, 1}, at::kBool), a = at::randn({3, 4}), b = at::randn({4});
  expect_alike(at::where(on_meta(condition), on_meta(a), on_meta(b)), at::where(condition, a, b));
}

TEST(MetaKernels, EqualTheCpusForAttention) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
    const at::Tensor q = at::randn({2, 6, 4, 8}).to(dtype).transpose(1, 2);  // from [B, S, H, D]
    const at::Tensor k = at::randn({2, 6, 2, 8}).to(dtype).transpose(1, 2);
    const auto [output, lse] = at::_scaled_dot_product_flash_attention_for_cpu(q, k, k, 0.0, true);
    const auto [meta_output, meta_lse] =
        at::_scaled_dot_product_flash_attention_for_cpu(on_meta(q), on_meta(k), on_meta(k), 0.0, true);
    expect_alike(meta_output, output);
    expect_alike(meta_lse, lse);
    const auto grads =
        at::_scaled_dot_product_flash_attention_for_cpu_backward(output, q, q, q, output, lse, 0.0, true);
    const auto meta_grads = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        meta_output, on_meta(q), on_meta(q), on_meta(q), meta_output, meta_lse, 0.0, true);
    expect_alike(std::get<0>(meta_grads), std::get<0>(grads));
    expect_alike(std::get<1>(meta_grads), std::get<1>(grads));
    expect_alike(std::get<2>(meta_grads), std::get<2>(grads));
  }
}

TEST(MetaKernels, EqualTheCpusForScaledProducts) {
  const at::Tensor a = at::randn({16, 32}).to(at::kFloat8_e4m3fn);
  const at::Tensor b = at::randn({48, 32}).to(at::kFloat8_e4m3fn).t();
  const at::Tensor one = at::ones({});
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16})
    expect_alike(at::_scaled_mm(on_meta(a), on_meta(b), on_meta(one), on_meta(one), {}, {}, dtype),
                 at::_scaled_mm(a, b, one, one, {}, {}, dtype));
}

TEST(MetaKernels, RunFusedOptimizers) {
  std::vector<at::Tensor> of_each;
  for (int i = 0; i < 4; ++i) of_each.push_back(at::zeros({3}, at::kMeta));
  const std::vector<at::Tensor> steps = {at::zeros({}, at::kMeta)};
  const auto one = [&](int i) { return std::vector<at::Tensor>{of_each[i]}; };
  auto p = one(0), g = one(1), m = one(2), v = one(3);
  at::_fused_adamw_(p, g, m, v, {}, steps, 1e-3, 0.9, 0.95, 0.1, 1e-8, false, false);
  at::_fused_adam_(p, g, m, v, {}, steps, 1e-3, 0.9, 0.95, 0.1, 1e-8, false, false);
  EXPECT_EQ(p[0].sizes(), at::IntArrayRef({3}));
}

}  // namespace
}  // namespace titan::ops
