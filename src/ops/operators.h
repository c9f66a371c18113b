#pragma once

// Our operators: how to call one through LibTorch's dispatcher, and their composites, which are written in
// LibTorch's operations. Composites run on devices and dtypes without a kernel of their own, and kernels are
// tested against them. Arguments and results are those of the schemas in operators.cpp.

#include <optional>
#include <tuple>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace titan::ops {

/// A handle on one of our operators; callers look it up once and keep it.
template <class Signature>
c10::TypedOperatorHandle<Signature> find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

namespace composite {

std::tuple<at::Tensor, at::Tensor> rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);
std::tuple<at::Tensor, at::Tensor> rms_norm_backward(const at::Tensor& grad, const at::Tensor& x,
                                                     const at::Tensor& weight, const at::Tensor& rstd);
at::Tensor rotary(const at::Tensor& x, const at::Tensor& table, const std::optional<at::Tensor>& positions,
                  bool inverse);
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);
std::tuple<at::Tensor, at::Tensor> swiglu_backward(const at::Tensor& grad, const at::Tensor& gate,
                                                   const at::Tensor& up);
at::Tensor cross_entropy_(at::Tensor& logits, const at::Tensor& labels, bool with_grad);
at::Tensor vocabulary_stats(const at::Tensor& logits, const at::Tensor& labels, int64_t first);
void vocabulary_grad_(at::Tensor& logits, const at::Tensor& labels, int64_t first, const at::Tensor& log_sum,
                      const std::optional<at::Tensor>& factors);
at::Tensor embedding_backward(const at::Tensor& grad, const at::Tensor& tokens, int64_t num_embeddings);

/// fp32, or float64 for float64.
inline at::ScalarType accumulate_type(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

}  // namespace composite
}  // namespace titan::ops
