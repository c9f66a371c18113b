#include "ops/attention_parts.h"

#include <ATen/ops/logaddexp.h>
#include <ATen/ops/sigmoid.h>

#include "ops/attention_kernels.h"
#include "titan/core/error.h"

namespace titan::ops {

namespace {

at::Tensor heads_first(const at::Tensor& x_BSHD) { return x_BSHD.transpose(1, 2); }

// The kernels know two masks. Queries that see `first_query` more keys than on a diagonal are a part without
// a mask, and a causal one.
struct Part {
  int64_t first_key, num_keys;
  bool causal;
};

c10::SmallVector<Part, 2> parts_of(int64_t num_queries, int64_t num_keys, int64_t first_query) {
  if (first_query >= num_keys - 1) return {{0, num_keys, false}};
  c10::SmallVector<Part, 2> parts;
  if (first_query > 0) parts.push_back({0, first_query, false});
  // What no query sees is left out: the kernels differ in where they put a diagonal that isn't square.
  const int64_t on_diagonal = std::min(num_queries, num_keys - first_query);
  TITAN_CHECK(on_diagonal == num_queries, "attention in parts: ", num_queries, " queries from position ",
              first_query, " on see a diagonal of ", on_diagonal,
              " keys only; LibTorch's kernels need one that is square, or no mask");
  parts.push_back({first_query, on_diagonal, true});
  return parts;
}

}  // namespace

void merge_attention(at::Tensor& into_BSHD, at::Tensor& into_log_sum_exp_BHS, const at::Tensor& part_BSHD,
                     const at::Tensor& part_log_sum_exp_BHS) {
  const at::Tensor part = part_log_sum_exp_BHS.to(into_log_sum_exp_BHS.scalar_type());
  // Of the sum, what the part contributes; all of it where there was nothing (-inf).
  const at::Tensor weight = at::sigmoid(part - into_log_sum_exp_BHS).transpose(1, 2).unsqueeze(-1);
  into_BSHD.lerp_(part_BSHD.to(into_BSHD.scalar_type()), weight);
  at::logaddexp_out(into_log_sum_exp_BHS, into_log_sum_exp_BHS, part);
}

void attend_by_libtorch(at::Tensor& out, at::Tensor& log_sum_exp, const at::Tensor& q, const at::Tensor& k,
                        const at::Tensor& v, int64_t first_query) {
  for (const Part& part : parts_of(q.size(1), k.size(1), first_query)) {
    const auto keys = [&](const at::Tensor& x) {
      return heads_first(x.narrow(1, part.first_key, part.num_keys));
    };
    const KernelResult result = run_attention_kernel(heads_first(q), keys(k), keys(v), part.causal);
    merge_attention(out, log_sum_exp, heads_first(result.out), result.log_sum_exp);
  }
}

void attend_backward_by_libtorch(at::Tensor& grad_q, at::Tensor& grad_k, at::Tensor& grad_v,
                                 const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k,
                                 const at::Tensor& v, const at::Tensor& out, const at::Tensor& log_sum_exp,
                                 int64_t first_query) {
  for (const Part& part : parts_of(q.size(1), k.size(1), first_query)) {
    const auto keys = [&](const at::Tensor& x) { return x.narrow(1, part.first_key, part.num_keys); };
    const KernelGradients grads =
        run_attention_kernel_backward(heads_first(grad), heads_first(q), heads_first(keys(k)),
                                      heads_first(keys(v)), heads_first(out), log_sum_exp, part.causal);
    grad_q.add_(heads_first(grads.q));
    keys(grad_k).add_(heads_first(grads.k));
    keys(grad_v).add_(heads_first(grads.v));
  }
}

}  // namespace titan::ops
