#include "plan/gpu/gpu_shapes.h"

#include <unordered_map>

#include <ATen/SDPBackend.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

namespace titan::plan {

namespace {

using at::Tensor;
using torch::jit::Stack;

// Numbers of the unused dropout, which kernels return on the host.
Tensor no_seed() { return at::zeros({}, at::TensorOptions().dtype(at::kLong)); }

Tensor like(const Tensor& t, at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::empty(sizes, t.options().dtype(dtype));
}

struct Attended {
  Tensor out, log_sum_exp;
};

// The output is laid out as [batch, queries, heads, features].
Attended attended(const Stack& arguments) {
  const Tensor q = arguments[0].toTensor(), v = arguments[2].toTensor();
  return {like(q, {q.size(0), q.size(2), q.size(1), v.size(3)}, q.scalar_type()).transpose(1, 2),
          like(q, {q.size(0), q.size(1), q.size(2)}, at::kFloat)};
}

Stack flash_or_cudnn(const Stack& arguments, bool is_cudnn) {
  const Tensor q = arguments[0].toTensor(), k = arguments[1].toTensor();
  const Attended result = attended(arguments);
  return {result.out,
          is_cudnn ? result.log_sum_exp.unsqueeze(-1) : result.log_sum_exp,
          Tensor(),
          Tensor(),
          q.size(2),
          k.size(2),
          is_cudnn ? no_seed() : like(q, {2}, at::kUInt64),
          is_cudnn ? no_seed() : like(q, {}, at::kUInt64),
          Tensor()};
}
Stack flash(const Stack& arguments) { return flash_or_cudnn(arguments, false); }
Stack cudnn(const Stack& arguments) { return flash_or_cudnn(arguments, true); }

Stack efficient(const Stack& arguments) {
  const Attended result = attended(arguments);
  const Tensor q = arguments[0].toTensor();
  const int64_t rows = arguments[4].toBool() ? (q.size(2) + 31) / 32 * 32 : 0;  // kernel_forward.h, kAlignLSE
  return {result.out, like(q, {q.size(0), q.size(1), rows}, at::kFloat), no_seed(), no_seed()};
}

// The gradients of the queries, keys and values, which follow the output's.
Stack gradients(const Stack& arguments) {
  Stack results;
  for (size_t i = 1; i <= 3; ++i) results.emplace_back(at::empty_like(arguments[i].toTensor()));
  return results;
}
Stack efficient_gradients(const Stack& arguments) {
  Stack results = gradients(arguments);
  results.emplace_back(Tensor());  // the bias's gradient
  return results;
}

// Attention within documents: q is [tokens, heads, features].
Stack packed_flash(const Stack& arguments) {
  const Tensor q = arguments[0].toTensor();
  return {at::empty_like(q, at::MemoryFormat::Contiguous), like(q, {q.size(1), q.size(0)}, at::kFloat),
          like(q, {2}, at::kUInt64), like(q, {}, at::kUInt64), Tensor()};
}
Stack packed_flash_gradients(const Stack& arguments) {
  Stack results;
  for (size_t i = 1; i <= 3; ++i)
    results.emplace_back(at::empty_like(arguments[i].toTensor(), at::MemoryFormat::Contiguous));
  return results;
}

Stack product(const Stack& arguments) {
  const Tensor a = arguments[0].toTensor(), b = arguments[1].toTensor();
  return {like(a, {a.size(0), b.size(1)}, arguments[2].toScalarType())};
}
Stack batched_product(const Stack& arguments) {
  const Tensor a = arguments[0].toTensor(), b = arguments[1].toTensor();
  return {like(a, {a.size(0), a.size(1), b.size(2)}, arguments[2].toScalarType())};
}
Stack added_product(const Stack& arguments) {
  const Tensor a = arguments[1].toTensor(), b = arguments[2].toTensor();
  return {like(a, {a.size(0), b.size(1)}, arguments[3].toScalarType())};
}
Stack last(const Stack& arguments) { return {arguments.back()}; }

// self, mat2, scale_a, scale_b, bias, scale_result, out_dtype, use_fast_accum
Stack scaled_product(const Stack& arguments) {
  const Tensor a = arguments[0].toTensor(), b = arguments[1].toTensor();
  return {
      like(a, {a.size(0), b.size(1)}, arguments[6].toOptional<at::ScalarType>().value_or(a.scalar_type()))};
}

}  // namespace

const ShapeRule* gpu_shape_rule(const std::string& name) {
  static const std::unordered_map<std::string, ShapeRule> rules = {
      {"aten::_scaled_dot_product_flash_attention", flash},
      {"aten::_scaled_dot_product_flash_attention_backward", gradients},
      {"aten::_scaled_dot_product_cudnn_attention", cudnn},
      {"aten::_scaled_dot_product_cudnn_attention_backward", gradients},
      {"aten::_scaled_dot_product_efficient_attention", efficient},
      {"aten::_scaled_dot_product_efficient_attention_backward", efficient_gradients},
      {"aten::_flash_attention_forward", packed_flash},
      {"aten::_flash_attention_backward", packed_flash_gradients},
      {"aten::mm.dtype", product},
      {"aten::mm.dtype_out", last},
      {"aten::bmm.dtype", batched_product},
      {"aten::bmm.dtype_out", last},
      {"aten::addmm.dtype", added_product},
      {"aten::addmm.dtype_out", last},
      {"aten::_scaled_mm", scaled_product},
      {"aten::_scaled_mm.out", last},
  };
  const auto found = rules.find(name);
  return found == rules.end() ? nullptr : &found->second;
}

// ATen/native/transformers/cuda/sdp_utils.cpp
int64_t attention_backend(const Tensor& q, const Tensor& k, const Tensor& v, bool is_causal, bool is_grouped,
                          int64_t compute_capability) {
  const auto backend = [&] {
    const bool is_16_bit = q.scalar_type() == at::kHalf || q.scalar_type() == at::kBFloat16;
    const int64_t features = q.size(-1);
    const bool has_square_mask = !is_causal || q.size(2) == k.size(2);
    if (is_16_bit && compute_capability >= 80 && features == v.size(-1)) {
      const bool prefers_cudnn = compute_capability / 10 == 9 || compute_capability == 100;
      if (prefers_cudnn && features % 8 == 0 && features <= 128) return at::SDPBackend::cudnn_attention;
      if (features <= 256 && has_square_mask) return at::SDPBackend::flash_attention;
    }
    if (!is_grouped) return at::SDPBackend::efficient_attention;
    return at::SDPBackend::math;
  }();
  return static_cast<int64_t>(backend);
}

}  // namespace titan::plan
