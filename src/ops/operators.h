#pragma once

// Our operators: calling one through LibTorch's dispatcher, and their composites, which are built from
// LibTorch's operations. Composites run on devices and dtypes without a kernel, and kernels are tested
// against them. Arguments and results are those of the schemas in operators.cpp. CPU kernels choose their
// template argument by a tensor's dtype.

#include <optional>
#include <tuple>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/BFloat16.h>

#include "ops/adam_formula.h"
#include "titan/core/error.h"

namespace titan::ops {

/// A handle to one of our operators. Callers look it up once and keep it.
template <class Signature>
c10::TypedOperatorHandle<Signature> find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

namespace composite {

std::tuple<at::Tensor, at::Tensor> rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);
std::tuple<at::Tensor, at::Tensor> rms_norm_backward(const at::Tensor& grad, const at::Tensor& x,
                                                     const at::Tensor& weight, const at::Tensor& rstd);
std::tuple<at::Tensor, at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x, const at::Tensor& added,
                                                            const at::Tensor& weight, double eps);
std::tuple<at::Tensor, at::Tensor> add_rms_norm_backward(const at::Tensor& grad, const at::Tensor& grad_sum,
                                                         const at::Tensor& sum, const at::Tensor& weight,
                                                         const at::Tensor& rstd);
std::vector<at::Tensor> rotary(at::TensorList x, const at::Tensor& table,
                               const std::optional<at::Tensor>& positions, bool inverse);
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);
std::tuple<at::Tensor, at::Tensor> swiglu_backward(const at::Tensor& grad, const at::Tensor& gate,
                                                   const at::Tensor& up);
std::tuple<at::Tensor, at::Tensor, at::Tensor> swiglu_with_backward(const at::Tensor& grad,
                                                                    const at::Tensor& gate,
                                                                    const at::Tensor& up);
void merge_attention_(at::Tensor& out, at::Tensor& log_sum_exp, const at::Tensor& part,
                      const at::Tensor& part_log_sum_exp);
at::Tensor sum_of_parts(at::TensorList parts);
at::Tensor cross_entropy_(at::Tensor& logits, const at::Tensor& labels, bool with_grad);
at::Tensor vocabulary_stats(const at::Tensor& logits, const at::Tensor& labels, int64_t first);
void vocabulary_grad_(at::Tensor& logits, const at::Tensor& labels, int64_t first, const at::Tensor& log_sum,
                      const std::optional<at::Tensor>& factors);
at::Tensor embedding_backward(const at::Tensor& grad, const at::Tensor& tokens, int64_t num_embeddings);
void adam_(at::TensorList params, at::TensorList grads, at::TensorList exp_avgs, at::TensorList exp_avg_sqs,
           at::TensorList steps, at::IntArrayRef places, double lr, double beta1, double beta2,
           double weight_decay, double eps, bool decoupled, bool stochastic,
           const std::optional<at::Tensor>& grad_factor, const std::optional<at::Tensor>& skip,
           const std::optional<at::Tensor>& lr_on_device);
/// Throws unless these are what all versions of adam_ take.
void check_adam(at::TensorList params, at::TensorList grads, at::TensorList exp_avgs,
                at::TensorList exp_avg_sqs, at::IntArrayRef places);
/// Parameter i's.
adam::Place adam_place(at::IntArrayRef places, size_t i);

/// fp32, or float64 for a float64 tensor.
inline at::ScalarType accumulate_type(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

}  // namespace composite

namespace cpu {

/// Whether all tensors have the same dtype and CPU kernels support it.
template <class... Tensors>
bool have_kernel(const at::Tensor& first, const Tensors&... others) {
  const at::ScalarType dtype = first.scalar_type();
  const bool known = dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kDouble;
  return known && ((others.scalar_type() == dtype) && ...);
}

/// Calls kernel(static_cast<T*>(nullptr)), where T is the tensor's dtype. have_kernel() must have accepted
/// it.
template <class Kernel>
void dispatch(const at::Tensor& tensor, Kernel&& kernel) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return kernel(static_cast<float*>(nullptr));
    case at::kBFloat16:
      return kernel(static_cast<c10::BFloat16*>(nullptr));
    case at::kDouble:
      return kernel(static_cast<double*>(nullptr));
    default:
      TITAN_INTERNAL_ASSERT(false, "no CPU kernel for ", tensor.scalar_type());
  }
}

}  // namespace cpu
}  // namespace titan::ops
