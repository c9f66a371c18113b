// The attention operators on a CPU: by our kernels in fp32, and in bf16 where they were measured to be faster
// or LibTorch's products of 16-bit matrices are slow; otherwise by LibTorch's flash attention.

#include <torch/library.h>

#include <ATen/ops/empty.h>

#include "ops/attention_kernels.h"
#include "ops/cpu/attention_kernel.h"
#include "ops/cpu_features.h"

namespace titan::ops {

namespace {

using cpu::AttentionStart;

// In bf16 too on AMD's processors with AVX-512 (docs/decisions/cpu_attention.md has the times).
bool have_own_kernel(const at::Tensor& q) {
  return q.scalar_type() == at::kFloat ||
         (q.scalar_type() == at::kBFloat16 && (!cpu_features().fast_16bit_products || cpu_features().amd));
}

template <class Kernel>
void dispatch_own(const at::Tensor& q, Kernel&& kernel) {
  if (q.scalar_type() == at::kFloat) return kernel(static_cast<float*>(nullptr));
  kernel(static_cast<c10::BFloat16*>(nullptr));
}

// LibTorch's kernels want the heads before the sequence.
at::Tensor heads_first(const at::Tensor& x_BSHD) { return x_BSHD.transpose(1, 2); }

/// Itself where the features of a head are adjacent.
at::Tensor with_adjacent_features(const at::Tensor& x) { return x.stride(-1) == 1 ? x : x.contiguous(); }

std::tuple<at::Tensor, at::Tensor> causal_attention_cpu(const at::Tensor& q, const at::Tensor& k,
                                                        const at::Tensor& v) {
  if (!have_own_kernel(q)) {
    const KernelResult result =
        run_attention_kernel(heads_first(q), heads_first(k), heads_first(v), /*causal=*/true);
    return {heads_first(result.out), result.log_sum_exp};
  }
  const at::Tensor out = at::empty(q.sizes(), q.options());
  const at::Tensor log_sum_exp = at::empty({q.size(0), q.size(2), q.size(1)}, q.options().dtype(at::kFloat));
  dispatch_own(q, [&]<class T>(T*) {
    cpu::attention_forward<T, T>(out, log_sum_exp, with_adjacent_features(q), with_adjacent_features(k),
                                 with_adjacent_features(v), /*first_query=*/0, AttentionStart::Nothing);
  });
  return {out, log_sum_exp};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> causal_attention_backward_cpu(
    const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& out, const at::Tensor& log_sum_exp) {
  if (!have_own_kernel(q)) {
    const KernelGradients grads =
        run_attention_kernel_backward(heads_first(grad), heads_first(q), heads_first(k), heads_first(v),
                                      heads_first(out), log_sum_exp, /*causal=*/true);
    return {heads_first(grads.q), heads_first(grads.k), heads_first(grads.v)};
  }
  const cpu::AttentionGradTensors grads{at::empty(q.sizes(), q.options()), at::empty(k.sizes(), k.options()),
                                        at::empty(v.sizes(), v.options())};
  dispatch_own(q, [&]<class T>(T*) {
    cpu::attention_backward<T, T>(grads, with_adjacent_features(grad), with_adjacent_features(q),
                                  with_adjacent_features(k), with_adjacent_features(v),
                                  with_adjacent_features(out), log_sum_exp, /*first_query=*/0,
                                  /*add=*/false);
  });
  return {grads.q, grads.k, grads.v};
}

void attend_cpu(at::Tensor& out, at::Tensor& log_sum_exp, const at::Tensor& q, const at::Tensor& k,
                const at::Tensor& v, int64_t first_query) {
  if (!have_own_kernel(q)) return attend_by_libtorch(out, log_sum_exp, q, k, v, first_query);
  dispatch_own(q, [&]<class T>(T*) {
    cpu::attention_forward<T, float>(out, log_sum_exp, with_adjacent_features(q), with_adjacent_features(k),
                                     with_adjacent_features(v), first_query, AttentionStart::Partial);
  });
}

void attend_backward_cpu(at::Tensor& grad_q, at::Tensor& grad_k, at::Tensor& grad_v, const at::Tensor& grad,
                         const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& out,
                         const at::Tensor& log_sum_exp, int64_t first_query) {
  if (!have_own_kernel(q))
    return attend_backward_by_libtorch(grad_q, grad_k, grad_v, grad, q, k, v, out, log_sum_exp, first_query);
  dispatch_own(q, [&]<class T>(T*) {
    cpu::attention_backward<T, float>({grad_q, grad_k, grad_v}, with_adjacent_features(grad),
                                      with_adjacent_features(q), with_adjacent_features(k),
                                      with_adjacent_features(v), with_adjacent_features(out), log_sum_exp,
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
