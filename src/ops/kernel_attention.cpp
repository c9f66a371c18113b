#include "ops/attention_kernels.h"
#include "ops/recorded_attention.h"

namespace titan::ops {

namespace {

at::Tensor heads_first(const at::Tensor& x) { return x.transpose(1, 2); }

struct KernelAttentionBackward final : AttentionBackward {
  variable_list backward(const at::Tensor& grad) override {
    const auto grads = run_attention_kernel_backward(
        heads_first(grad), heads_first(q.unpack()), heads_first(k.unpack()), heads_first(v.unpack()),
        heads_first(out.unpack(getptr())), log_sum_exp.unpack(), /*causal=*/true);
    return {heads_first(grads.q), heads_first(grads.k), heads_first(grads.v)};
  }
  std::string name() const override { return "titan::causal_attention backward (LibTorch's kernel)"; }
};

}  // namespace

at::Tensor kernel_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  using Results = std::tuple<at::Tensor, at::Tensor>;
  return recorded_attention<KernelAttentionBackward>(q, k, v, [&]() -> Results {
    const auto result = run_attention_kernel(heads_first(q), heads_first(k), heads_first(v), /*causal=*/true);
    return {heads_first(result.out), result.log_sum_exp};
  });
}

}  // namespace titan::ops
