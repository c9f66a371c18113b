// The attention operators on a CPU: by our kernels in fp32, and in bf16 where they were measured to be faster
// or LibTorch's products of 16-bit matrices are slow; otherwise by LibTorch's flash attention.

#include <tuple>

#include <torch/library.h>

#include <ATen/ops/empty.h>

#include "ops/attention_kernels.h"
#include "ops/cpu/attention_kernel.h"
#include "ops/cpu_features.h"

namespace titan::ops {

namespace {

using cpu::AttentionStart;

// On AMD's processors with AVX-512 in bf16 too (docs/decisions/cpu_attention.md has the times).
bool have_own_kernel(const at::Tensor& q) {
  return q.scalar_type() == at::kFloat ||
         (q.scalar_type() == at::kBFloat16 && (!cpu_features().fast_16bit_products || cpu_features().amd));
}

template <class Kernel>
void dispatch_own(const at::Tensor& q, Kernel&& kernel) {
  if (q.scalar_type() == at::kFloat) return kernel(static_cast<float*>(nullptr));
  kernel(static_cast<c10::BFloat16*>(nullptr));
}

std::tuple<at::Tensor, at::Tensor> causal_attention_cpu(const at::Tensor& q, const at::Tensor& k,
                                                        const at::Tensor& v) {
  if (!have_own_kernel(q)) {
    const KernelResult result = run_attention_kernel(heads_first({q, k, v}), /*causal=*/true);
    return {heads_first(result.out), result.log_sum_exp};
  }
  const AttentionSum sum{at::empty(q.sizes(), q.options()),
                         at::empty({q.size(0), q.size(2), q.size(1)}, q.options().dtype(at::kFloat))};
  dispatch_own(q, [&]<class T>(T*) {
    cpu::attention_forward<T, T>(sum, with_adjacent_features({q, k, v}), /*first_query=*/0,
                                 AttentionStart::Nothing);
  });
  return {sum.out_BSHD, sum.log_sum_exp_BHS};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> causal_attention_backward_cpu(
    const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& out, const at::Tensor& log_sum_exp) {
  if (!have_own_kernel(q)) {
    const QueriesKeysValues grads = heads_first(run_attention_kernel_backward(
        heads_first(grad), heads_first({q, k, v}), {heads_first(out), log_sum_exp}, /*causal=*/true));
    return {grads.q, grads.k, grads.v};
  }
  const QueriesKeysValues grads{at::empty(q.sizes(), q.options()), at::empty(k.sizes(), k.options()),
                                at::empty(v.sizes(), v.options())};
  dispatch_own(q, [&]<class T>(T*) {
    cpu::attention_backward<T, T>(grads, with_adjacent_features({q, k, v}),
                                  {.grad = with_adjacent_features(grad),
                                   .out = with_adjacent_features(out),
                                   .log_sum_exp = log_sum_exp},
                                  /*first_query=*/0, /*add=*/false);
  });
  return {grads.q, grads.k, grads.v};
}

void attend_cpu(at::Tensor& out, at::Tensor& log_sum_exp, const at::Tensor& q, const at::Tensor& k,
                const at::Tensor& v, int64_t first_query) {
  if (!have_own_kernel(q)) return attend_by_libtorch(out, log_sum_exp, q, k, v, first_query);
  dispatch_own(q, [&]<class T>(T*) {
    cpu::attention_forward<T, float>({out, log_sum_exp}, with_adjacent_features({q, k, v}), first_query,
                                     AttentionStart::Partial);
  });
}

void attend_backward_cpu(at::Tensor& grad_q, at::Tensor& grad_k, at::Tensor& grad_v, const at::Tensor& grad,
                         const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& out,
                         const at::Tensor& log_sum_exp, int64_t first_query) {
  if (!have_own_kernel(q))
    return attend_backward_by_libtorch(grad_q, grad_k, grad_v, grad, q, k, v, out, log_sum_exp, first_query);
  dispatch_own(q, [&]<class T>(T*) {
    cpu::attention_backward<T, float>({grad_q, grad_k, grad_v}, with_adjacent_features({q, k, v}),
                                      {.grad = with_adjacent_features(grad),
                                       .out = with_adjacent_features(out),
                                       .log_sum_exp = log_sum_exp},
                                      first_query, /*add=*/true);
  });
}

TORCH_LIBRARY_IMPL(titan, CPU, m) {
  m.impl("causal_attention", causal_attention_cpu);
  m.impl("causal_attention_backward", causal_attention_backward_cpu);
  m.impl("attend_", attend_cpu);
  m.impl("attend_backward_", attend_backward_cpu);
}

}  // namespace
}  // namespace titan::ops
