// Operations that only CUDA has: its three attention kernels, all computed by the CPU's flash attention, products of 16-bit
// matrices with a 32-bit result, and the fused RMS norm.

#include <limits>

#include <ATen/ATen.h>
#include <torch/library.h>

#include "kernels/call.h"

namespace virtual_gpu {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using std::optional;

struct Attention {
  Tensor output;       // [batch, heads, queries, head_dim], laid out as [batch, queries, heads, head_dim]
  Tensor log_sum_exp;  // [batch, heads, queries], float
};

Attention attend(const char* name, const Tensor& q, const Tensor& k, const Tensor& v,
                 const OptionalTensor& mask, bool is_causal, optional<double> scale) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  for (const Tensor& t : {q, k, v})  // as the real kernels check
    TORCH_CHECK(t.stride(-1) == 1, name, ": Input tensor must have contiguous last dimension");
  Attention result{at::empty({q.size(0), q.size(2), q.size(1), v.size(3)}, q.options()).transpose(1, 2),
                   at::empty({q.size(0), q.size(1), q.size(2)}, q.options().dtype(at::kFloat))};
  StandIns memory(StandIns::Kind::cpu);
  const auto cpu = [&](const Tensor& t) { return memory.stand_in(t); };
  run_on_device(
      name, {q, k, v, mask.value_or(Tensor())}, {result.output, result.log_sum_exp},
      [q = cpu(q), k = cpu(k), v = cpu(v), mask = mask ? optional(cpu(*mask)) : std::nullopt, is_causal,
       scale, output = cpu(result.output), log_sum_exp = cpu(result.log_sum_exp)]() mutable {
        const at::AutoDispatchBelowADInplaceOrView below;
        auto [o, l] = at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0, is_causal, mask, scale);
        output.copy_(o);
        log_sum_exp.copy_(l);
      });
  return result;
}

struct Gradients {
  Tensor q, k, v;
};

// The CPU's backward reads its inputs as if they were laid out as [batch, tokens, heads, head_dim].
Tensor dense(const Tensor& t) { return t.transpose(1, 2).contiguous().transpose(1, 2); }

Gradients attend_backward(const char* name, const Tensor& grad, const Tensor& q, const Tensor& k,
                          const Tensor& v, const Attention& forward, const OptionalTensor& mask,
                          bool is_causal, optional<double> scale) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  TORCH_CHECK(grad.stride(-1) == 1, name, ": Input tensor must have contiguous last dimension");
  Gradients result{at::empty_like(q), at::empty_like(k), at::empty_like(v)};
  StandIns memory(StandIns::Kind::cpu);
  const auto cpu = [&](const Tensor& t) { return memory.stand_in(t); };
  run_on_device(name, {grad, q, k, v, forward.output, forward.log_sum_exp, mask.value_or(Tensor())},
                {result.q, result.k, result.v},
                [grad = cpu(grad), q = cpu(q), k = cpu(k), v = cpu(v), o = cpu(forward.output),
                 l = cpu(forward.log_sum_exp), mask = mask ? optional(cpu(*mask)) : std::nullopt, is_causal,
                 scale, grad_q = cpu(result.q), grad_k = cpu(result.k), grad_v = cpu(result.v)]() mutable {
                  const at::AutoDispatchBelowADInplaceOrView below;
                  auto [a, b, c] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
                      dense(grad), dense(q), dense(k), dense(v), dense(o), l, 0, is_causal, mask, scale);
                  grad_q.copy_(a);
                  grad_k.copy_(b);
                  grad_v.copy_(c);
                });
  return result;
}

Tensor unused_seed() { return at::zeros({}, at::TensorOptions().dtype(at::kLong)); }

using FlashResult =
    std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>;

FlashResult flash(const Tensor& q, const Tensor& k, const Tensor& v, double, bool is_causal, bool,
                  optional<double> scale) {
  auto [o, l] = attend("aten::_scaled_dot_product_flash_attention", q, k, v, {}, is_causal, scale);
  return {o, l, Tensor(), Tensor(), q.size(2), k.size(2), unused_seed(), unused_seed(), Tensor()};
}
std::tuple<Tensor, Tensor, Tensor> flash_backward(const Tensor& grad, const Tensor& q, const Tensor& k,
                                                  const Tensor& v, const Tensor& o, const Tensor& l,
                                                  const Tensor&, const Tensor&, c10::SymInt, c10::SymInt,
                                                  double, bool is_causal, const Tensor&, const Tensor&,
                                                  optional<double> scale) {
  auto [a, b, c] = attend_backward("aten::_scaled_dot_product_flash_attention_backward", grad, q, k, v,
                                   {o, l}, {}, is_causal, scale);
  return {a, b, c};
}

FlashResult cudnn(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& bias, bool, double,
                  bool is_causal, bool, optional<double> scale) {
  auto [o, l] = attend("aten::_scaled_dot_product_cudnn_attention", q, k, v, bias, is_causal, scale);
  return {o,         l.unsqueeze(-1), Tensor(),      Tensor(), q.size(2),
          k.size(2), unused_seed(),   unused_seed(), Tensor()};
}
std::tuple<Tensor, Tensor, Tensor> cudnn_backward(const Tensor& grad, const Tensor& q, const Tensor& k,
                                                  const Tensor& v, const Tensor& o, const Tensor& l,
                                                  const Tensor&, const Tensor&, const Tensor& bias,
                                                  const Tensor&, const Tensor&, c10::SymInt, c10::SymInt,
                                                  double, bool is_causal, optional<double> scale) {
  auto [a, b, c] =
      attend_backward("aten::_scaled_dot_product_cudnn_attention_backward", grad, q, k, v, {o, l.squeeze(-1)},
                      bias.defined() ? optional(bias) : std::nullopt, is_causal, scale);
  return {a, b, c};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient(const Tensor& q, const Tensor& k, const Tensor& v,
                                                     const OptionalTensor& bias, bool, double, bool is_causal,
                                                     optional<double> scale) {
  auto [o, l] = attend("aten::_scaled_dot_product_efficient_attention", q, k, v, bias, is_causal, scale);
  return {o, l, unused_seed(), unused_seed()};
}
std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_backward(const Tensor& grad, const Tensor& q,
                                                              const Tensor& k, const Tensor& v,
                                                              const Tensor& bias, const Tensor& o,
                                                              const Tensor& l, const Tensor&, const Tensor&,
                                                              double, std::array<bool, 4> needed,
                                                              bool is_causal, optional<double> scale) {
  TORCH_CHECK(!needed[3], "virtual GPU: the gradient of an attention bias isn't written");
  auto [a, b, c] = attend_backward("aten::_scaled_dot_product_efficient_attention_backward", grad, q, k, v,
                                   {o, l}, bias.defined() ? optional(bias) : std::nullopt, is_causal, scale);
  return {a, b, c, Tensor()};
}

Tensor& multiply(const char* name, const Tensor& a, const Tensor& b, at::ScalarType dtype, Tensor& out) {
  StandIns memory(StandIns::Kind::cpu);
  run_on_device(
      name, {a, b}, {out},
      [a = memory.stand_in(a), b = memory.stand_in(b), out = memory.stand_in(out), dtype]() mutable {
        const at::AutoDispatchBelowADInplaceOrView below;
        out.copy_(at::matmul(a.to(dtype), b.to(dtype)));
      });
  return out;
}
// out may be `sum`.
Tensor& addmm_out(const Tensor& sum, const Tensor& a, const Tensor& b, at::ScalarType dtype,
                  const at::Scalar& beta, const at::Scalar& alpha, Tensor& out) {
  StandIns memory(StandIns::Kind::cpu);
  run_on_device("aten::addmm.dtype", {sum, a, b}, {out},
                [sum = memory.stand_in(sum), a = memory.stand_in(a), b = memory.stand_in(b),
                 out = memory.stand_in(out), dtype, beta, alpha]() mutable {
                  const at::AutoDispatchBelowADInplaceOrView below;
                  out.copy_(at::addmm(sum.to(dtype), a.to(dtype), b.to(dtype), beta, alpha));
                });
  return out;
}
Tensor& mm_out(const Tensor& a, const Tensor& b, at::ScalarType dtype, Tensor& out) {
  return multiply("aten::mm.dtype", a, b, dtype, out);
}
Tensor mm(const Tensor& a, const Tensor& b, at::ScalarType dtype) {
  Tensor out = at::empty({a.size(0), b.size(1)}, a.options().dtype(dtype));
  return mm_out(a, b, dtype, out);
}
Tensor bmm(const Tensor& a, const Tensor& b, at::ScalarType dtype) {
  Tensor out = at::empty({a.size(0), a.size(1), b.size(2)}, a.options().dtype(dtype));
  return multiply("aten::bmm.dtype", a, b, dtype, out);
}

// PyTorch's own models call it; LibTitan has a kernel of its own.
std::tuple<Tensor, Tensor> rms_norm(const Tensor& x, at::IntArrayRef shape, const OptionalTensor& weight,
                                    optional<double> eps) {
  std::vector<int64_t> row_sizes = x.sizes().vec();
  for (size_t i = 0; i < shape.size(); ++i) row_sizes[row_sizes.size() - 1 - i] = 1;
  Tensor y = at::empty_like(x), rstd = at::empty(row_sizes, x.options().dtype(at::kFloat));
  StandIns memory(StandIns::Kind::cpu);
  const auto cpu = [&](const Tensor& t) { return memory.stand_in(t); };
  run_on_device("aten::_fused_rms_norm", {x, weight.value_or(Tensor())}, {y, rstd},
                [x = cpu(x), w = weight ? cpu(*weight) : Tensor(), rows = row_sizes, eps, y = cpu(y),
                 rstd = cpu(rstd)]() mutable {
                  const at::AutoDispatchBelowADInplaceOrView below;
                  const Tensor wide = x.to(at::kFloat).reshape({rstd.numel(), -1});
                  const double epsilon = eps.value_or(std::numeric_limits<float>::epsilon());
                  rstd.copy_(at::rsqrt(wide.square().mean(-1) + epsilon).view(rows));
                  Tensor out = (wide * rstd.view({-1, 1})).view(x.sizes());
                  y.copy_(w.defined() ? out * w : out);
                });
  return {y, rstd};
}
std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad, const Tensor& x, at::IntArrayRef shape,
                                             const Tensor& rstd, const OptionalTensor& weight,
                                             std::array<bool, 2>) {
  const bool weighs = weight && weight->defined();
  Tensor grad_x = at::empty_like(x), grad_weight = weighs ? at::empty_like(*weight) : Tensor();
  StandIns memory(StandIns::Kind::cpu);
  const auto cpu = [&](const Tensor& t) { return memory.stand_in(t); };
  run_on_device(
      "aten::_fused_rms_norm_backward", {grad, x, rstd, weight.value_or(Tensor())}, {grad_x, grad_weight},
      [grad = cpu(grad), x = cpu(x), rstd = cpu(rstd), w = weighs ? cpu(*weight) : Tensor(),
       size = c10::multiply_integers(shape), grad_x = cpu(grad_x), grad_weight = cpu(grad_weight)]() mutable {
        const at::AutoDispatchBelowADInplaceOrView below;
        const Tensor scale = rstd.view({-1, 1}), g = grad.to(at::kFloat).reshape({-1, size}),
                     n = x.to(at::kFloat).reshape({-1, size}) * scale;
        const Tensor h = w.defined() ? g * w.view(-1) : g;
        grad_x.copy_((scale * (h - n * (h * n).mean(-1, true))).view(x.sizes()));
        if (w.defined()) grad_weight.copy_((g * n).sum(0).view(w.sizes()));
      });
  return {grad_x, grad_weight};
}

}  // namespace

void install_cuda_only_kernels() {
  static auto* library =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  library->impl("_scaled_dot_product_flash_attention", TORCH_FN(flash));
  library->impl("_scaled_dot_product_flash_attention_backward", TORCH_FN(flash_backward));
  library->impl("_scaled_dot_product_cudnn_attention", TORCH_FN(cudnn));
  library->impl("_scaled_dot_product_cudnn_attention_backward", TORCH_FN(cudnn_backward));
  library->impl("_scaled_dot_product_efficient_attention", TORCH_FN(efficient));
  library->impl("_scaled_dot_product_efficient_attention_backward", TORCH_FN(efficient_backward));
  library->impl("_fused_rms_norm", TORCH_FN(rms_norm));
  library->impl("_fused_rms_norm_backward", TORCH_FN(rms_norm_backward));
  library->impl("mm.dtype", TORCH_FN(mm));
  library->impl("mm.dtype_out", TORCH_FN(mm_out));
  library->impl("addmm.dtype_out", TORCH_FN(addmm_out));
  library->impl("bmm.dtype", TORCH_FN(bmm));
}

}  // namespace virtual_gpu
