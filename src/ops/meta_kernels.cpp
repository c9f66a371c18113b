// Meta kernels (sizes without data) of LibTorch's operations that PyTorch keeps in Python: without them a dry
// run of a model stops at its embedding. Memory layouts are those of the CPU kernels.

#include <torch/library.h>

#include <ATen/ExpandUtils.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/result_type.h>

#include "ops/composite.h"
#include "titan/core/error.h"

namespace titan::ops {

namespace {

at::Tensor index_select(const at::Tensor& self, int64_t dim, const at::Tensor& index) {
  std::vector<int64_t> sizes = self.sizes().vec();
  if (!sizes.empty()) sizes[static_cast<size_t>(at::maybe_wrap_dim(dim, self.dim()))] = index.numel();
  return at::empty(sizes, self.options());
}

at::Tensor embedding_dense_backward(const at::Tensor& grad, const at::Tensor& /*indices*/,
                                    int64_t num_weights, int64_t /*padding_idx*/,
                                    bool /*scale_grad_by_freq*/) {
  return at::empty({num_weights, grad.size(-1)}, grad.options());
}

at::Tensor where(const at::Tensor& condition, const at::Tensor& self, const at::Tensor& other) {
  const auto sizes = at::infer_size(condition.sizes(), at::infer_size(self.sizes(), other.sizes()));
  return at::empty(sizes, self.options().dtype(at::result_type(self, other)));
}

// Heads before the sequence in the sizes, behind it in memory.
at::Tensor heads_first(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return at::empty({sizes[0], sizes[2], sizes[1], sizes[3]}, options).transpose(1, 2);
}

std::tuple<at::Tensor, at::Tensor> flash_attention(const at::Tensor& query, const at::Tensor& /*key*/,
                                                   const at::Tensor& value, double /*dropout_p*/,
                                                   bool /*is_causal*/,
                                                   const std::optional<at::Tensor>& /*mask*/,
                                                   std::optional<double> /*scale*/) {
  const auto sizes = query.sizes();
  const at::Tensor log_sum_exp =
      at::empty({sizes[0], sizes[2], sizes[1]}, query.options().dtype(composite::accumulate_type(query)))
          .transpose(1, 2);
  return {heads_first({sizes[0], sizes[1], sizes[2], value.size(3)}, query.options()), log_sum_exp};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> flash_attention_backward(
    const at::Tensor& /*grad*/, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& /*out*/, const at::Tensor& /*log_sum_exp*/, double /*dropout_p*/, bool /*is_causal*/,
    const std::optional<at::Tensor>& /*mask*/, std::optional<double> /*scale*/) {
  const auto like = [](const at::Tensor& tensor) { return heads_first(tensor.sizes(), tensor.options()); };
  return {like(query), like(key), like(value)};
}

at::Tensor scaled_mm(const at::Tensor& self, const at::Tensor& other, const at::Tensor& /*scale_a*/,
                     const at::Tensor& /*scale_b*/, const std::optional<at::Tensor>& /*bias*/,
                     const std::optional<at::Tensor>& /*scale_result*/,
                     std::optional<at::ScalarType> out_dtype, bool /*use_fast_accum*/) {
  TITAN_CHECK(self.size(1) == other.size(0), "_scaled_mm of ", self.sizes(), " and ", other.sizes());
  return at::empty({self.size(0), other.size(1)},
                   self.options().dtype(out_dtype.value_or(self.scalar_type())));
}

// Writes in place, and there is nothing to write.
void fused_adam(at::TensorList /*self*/, at::TensorList /*grads*/, at::TensorList /*exp_avgs*/,
                at::TensorList /*exp_avg_sqs*/, at::TensorList /*max_exp_avg_sqs*/,
                at::TensorList /*state_steps*/, double /*lr*/, double /*beta1*/, double /*beta2*/,
                double /*weight_decay*/, double /*eps*/, bool /*amsgrad*/, bool /*maximize*/,
                const std::optional<at::Tensor>& /*grad_scale*/,
                const std::optional<at::Tensor>& /*found_inf*/) {}

TORCH_LIBRARY_IMPL(aten, Meta, m) {
  m.impl("index_select", index_select);
  m.impl("embedding_dense_backward", embedding_dense_backward);
  m.impl("where.self", where);
  m.impl("_scaled_dot_product_flash_attention_for_cpu", flash_attention);
  m.impl("_scaled_dot_product_flash_attention_for_cpu_backward", flash_attention_backward);
  m.impl("_scaled_mm", scaled_mm);
  m.impl("_fused_adamw_", fused_adam);
  m.impl("_fused_adam_", fused_adam);
}

}  // namespace
}  // namespace titan::ops
