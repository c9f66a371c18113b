#pragma once

// Calls of our operations through the dispatcher; handles are looked up once.

#include <cstdint>
#include <optional>
#include <tuple>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace titan::ops {

template <class Signature>
c10::TypedOperatorHandle<Signature> find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace titan::ops

namespace titan::ops::composite {

// Our operations in terms of LibTorch's: what runs on devices and dtypes without a kernel of their own, and
// what the kernels are tested against. Arguments and results as in library.cpp's schemas.

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
void vocabulary_grad_(at::Tensor& logits, const at::Tensor& labels, int64_t first, const at::Tensor& log_sum);
at::Tensor embedding_backward(const at::Tensor& grad, const at::Tensor& tokens, int64_t num_embeddings);

/// fp32, or float64 of float64.
inline at::ScalarType accumulate_type(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

}  // namespace titan::ops::composite
