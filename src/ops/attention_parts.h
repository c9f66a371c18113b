#pragma once

// Attention over parts of the keys by LibTorch's flash, cuDNN and memory-efficient kernels. Arguments as of
// titan::attend_ and titan::attend_backward_ (library.cpp).

#include <ATen/core/Tensor.h>

namespace titan::ops {

void attend_by_libtorch(at::Tensor& out, at::Tensor& log_sum_exp, const at::Tensor& q, const at::Tensor& k,
                        const at::Tensor& v, int64_t first_query);

void attend_backward_by_libtorch(at::Tensor& grad_q, at::Tensor& grad_k, at::Tensor& grad_v,
                                 const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k,
                                 const at::Tensor& v, const at::Tensor& out, const at::Tensor& log_sum_exp,
                                 int64_t first_query);

/// into += part, as results of one softmax over the keys of both.
void merge_attention(at::Tensor& into_BSHD, at::Tensor& into_log_sum_exp_BHS, const at::Tensor& part_BSHD,
                     const at::Tensor& part_log_sum_exp_BHS);

}  // namespace titan::ops
