// Operations that only CUDA has: its three attention kernels and FlashAttention's entry for packed sequences, all computed by the CPU's flash attention, products of 16-bit
// matrices with a 32-bit result, and the fused RMS norm.

#include <algorithm>
#include <functional>
#include <limits>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/cuda/CUDAContext.h>
#include <torch/library.h>

#include "kernels/call.h"
#include "plan/gpu/shapes.h"

namespace virtual_gpu {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using std::optional;

struct Attention {
  Tensor output;       // [batch, heads, queries, head_dim], laid out as [batch, queries, heads, head_dim]
  Tensor log_sum_exp;  // [batch, heads, queries], float
};

// The types and head sizes of LibTorch's kernels: flash_api.cpp ("only support fp16 and bf16", "head dimension at most 256"; its caller pads head sizes to
// multiples of 8), MHA.cpp for cuDNN, whose head sizes are multiples of 8, and attention.cu for the efficient one.
struct Limits {
  std::vector<at::ScalarType> types;
  int64_t largest_head = 0, multiple = 1;
};
const Limits of_flash{{at::kHalf, at::kBFloat16}, 256, 1};
const Limits of_flash_backward{{at::kHalf, at::kBFloat16}, 256, 8};
const Limits of_cudnn{{at::kHalf, at::kBFloat16}, 256, 8};
const Limits of_efficient{{at::kHalf, at::kBFloat16, at::kFloat}, std::numeric_limits<int64_t>::max(), 1};

void check_attention(const char* name, const Limits& limits, const Tensor& q, const Tensor& k,
                     const Tensor& v) {
  for (const Tensor& t : {q, k, v}) {
    TORCH_CHECK(t.dim() == 4 && t.stride(-1) == 1, name,
                ": Input tensor must have contiguous last dimension");
    TORCH_CHECK(t.scalar_type() == q.scalar_type() && std::ranges::count(limits.types, t.scalar_type()) > 0,
                name, ": no kernel for ", t.scalar_type(), " beside queries of ", q.scalar_type());
    TORCH_CHECK(t.size(-1) <= limits.largest_head && t.size(-1) % limits.multiple == 0, name,
                ": no kernel for a head size of ", t.size(-1));
    TORCH_CHECK(t.device() == q.device(), name, ": inputs on ", q.device(), " and on ", t.device());
  }
}

void check_backward(const char* name, const Limits& limits, const Tensor& grad, const Tensor& q,
                    const Tensor& k, const Tensor& v) {
  check_attention(name, limits, q, k, v);
  check_attention(name, limits, grad, v, v);
}

void check_no_dropout(double probability) {
  TORCH_CHECK(probability == 0, "virtual GPU: attention with dropout isn't written");
}

// kernel_forward.h and kernel_backward.h, check_supported: for tensor cores from compute capability 8.0 on.
void check_alignment(const char* name, const Tensor& t) {
  constexpr int64_t alignment = 4;
  TORCH_CHECK(
      reinterpret_cast<uintptr_t>(t.const_data_ptr()) % (alignment * static_cast<size_t>(t.itemsize())) == 0,
      name, ": an input is not correctly aligned");
  for (const int64_t dim : {0, 1, 2})
    TORCH_CHECK((dim < 2 && t.size(dim) <= 1) || t.stride(dim) % alignment == 0, name,
                ": an input is not correctly aligned (stride ", t.stride(dim), " of dimension ", dim, ")");
}

titan::plan::Temporaries temporaries(const char* name, std::span<const c10::IValue> arguments) {
  return {name, arguments, at::cuda::getCurrentDeviceProperties()->multiProcessorCount, compute_capability()};
}

// The log-sum-exp has the queries' rows, filled up with infinity to a multiple of `rows`.
Attention attend(const char* name, const Tensor& q, const Tensor& k, const Tensor& v,
                 const OptionalTensor& mask, bool is_causal, optional<double> scale, int64_t rows = 1,
                 titan::plan::Temporaries* temporary = nullptr) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  Attention result{
      at::empty({q.size(0), q.size(2), q.size(1), v.size(3)}, q.options()).transpose(1, 2),
      at::empty({q.size(0), q.size(1), (q.size(2) + rows - 1) / rows * rows}, q.options().dtype(at::kFloat))};
  if (temporary) temporary->take_rest();
  StandIns memory(StandIns::Kind::cpu);
  const auto cpu = [&](const Tensor& t) { return memory.stand_in(t); };
  run_on_device(
      name, {q, k, v, mask.value_or(Tensor())}, {result.output, result.log_sum_exp},
      [q = cpu(q), k = cpu(k), v = cpu(v), mask = mask ? optional(cpu(*mask)) : std::nullopt, is_causal,
       scale, output = cpu(result.output), log_sum_exp = cpu(result.log_sum_exp)]() mutable {
        const at::AutoDispatchBelowADInplaceOrView below;
        auto [o, l] = at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0, is_causal, mask, scale);
        output.copy_(o);
        log_sum_exp.fill_(std::numeric_limits<float>::infinity());
        log_sum_exp.narrow(2, 0, q.size(2)).copy_(l);
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
                          bool is_causal, optional<double> scale,
                          titan::plan::Temporaries* temporary = nullptr) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  TORCH_CHECK(grad.stride(-1) == 1, name, ": Input tensor must have contiguous last dimension");
  Gradients result{at::empty_like(q), at::empty_like(k), at::empty_like(v)};
  if (temporary) temporary->take_rest();
  StandIns memory(StandIns::Kind::cpu);
  const auto cpu = [&](const Tensor& t) { return memory.stand_in(t); };
  run_on_device(name, {grad, q, k, v, forward.output, forward.log_sum_exp, mask.value_or(Tensor())},
                {result.q, result.k, result.v},
                [grad = cpu(grad), q = cpu(q), k = cpu(k), v = cpu(v), o = cpu(forward.output),
                 l = cpu(forward.log_sum_exp), mask = mask ? optional(cpu(*mask)) : std::nullopt, is_causal,
                 scale, grad_q = cpu(result.q), grad_k = cpu(result.k), grad_v = cpu(result.v)]() mutable {
                  const at::AutoDispatchBelowADInplaceOrView below;
                  auto [a, b, c] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
                      dense(grad), dense(q), dense(k), dense(v), dense(o), l.contiguous(), 0, is_causal, mask,
                      scale);
                  grad_q.copy_(a);
                  grad_k.copy_(b);
                  grad_v.copy_(c);
                });
  return result;
}

// FlashAttention's seed and offset, which nothing reads without dropout.
std::pair<Tensor, Tensor> unused_state(const Tensor& q) {
  const auto options = q.options().dtype(at::kUInt64);
  return {at::empty({2}, options), at::empty({}, options)};
}
Tensor unused_seed() { return at::zeros({}, at::TensorOptions().dtype(at::kLong)); }

using FlashResult =
    std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>;

FlashResult flash(const Tensor& q, const Tensor& k, const Tensor& v, double dropout, bool is_causal, bool,
                  optional<double> scale) {
  check_no_dropout(dropout);
  check_attention("aten::_scaled_dot_product_flash_attention", of_flash, q, k, v);
  const char* const name = "aten::_scaled_dot_product_flash_attention";
  const std::array<c10::IValue, 2> inputs{q, k};
  titan::plan::Temporaries temporary = temporaries(name, inputs);
  auto [o, l] = attend(name, q, k, v, {}, is_causal, scale, /*rows=*/1, &temporary);
  const auto [seed, offset] = unused_state(q);
  return {o, l, Tensor(), Tensor(), q.size(2), k.size(2), seed, offset, Tensor()};
}
std::tuple<Tensor, Tensor, Tensor> flash_backward(const Tensor& grad, const Tensor& q, const Tensor& k,
                                                  const Tensor& v, const Tensor& o, const Tensor& l,
                                                  const Tensor&, const Tensor&, c10::SymInt, c10::SymInt,
                                                  double dropout, bool is_causal, const Tensor&,
                                                  const Tensor&, optional<double> scale) {
  check_no_dropout(dropout);
  check_backward("aten::_scaled_dot_product_flash_attention_backward", of_flash_backward, grad, q, k, v);
  const char* const name = "aten::_scaled_dot_product_flash_attention_backward";
  const std::array<c10::IValue, 5> inputs{grad, q, k, v, o};
  titan::plan::Temporaries temporary = temporaries(name, inputs);
  auto [a, b, c] = attend_backward(name, grad, q, k, v, {o, l}, {}, is_causal, scale, &temporary);
  return {a, b, c};
}

FlashResult cudnn(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& bias,
                  bool needs_sums, double dropout, bool is_causal, bool, optional<double> scale) {
  check_no_dropout(dropout);
  check_attention("aten::_scaled_dot_product_cudnn_attention", of_cudnn, q, k, v);
  auto [o, l] = attend("aten::_scaled_dot_product_cudnn_attention", q, k, v, bias, is_causal, scale);
  return {o,
          needs_sums ? l.unsqueeze(-1) : Tensor(),
          Tensor(),
          Tensor(),
          q.size(2),
          k.size(2),
          unused_seed(),
          unused_seed(),
          Tensor()};
}
std::tuple<Tensor, Tensor, Tensor> cudnn_backward(const Tensor& grad, const Tensor& q, const Tensor& k,
                                                  const Tensor& v, const Tensor& o, const Tensor& l,
                                                  const Tensor&, const Tensor&, const Tensor& bias,
                                                  const Tensor&, const Tensor&, c10::SymInt, c10::SymInt,
                                                  double dropout, bool is_causal, optional<double> scale) {
  check_no_dropout(dropout);
  check_backward("aten::_scaled_dot_product_cudnn_attention_backward", of_cudnn, grad, q, k, v);
  auto [a, b, c] =
      attend_backward("aten::_scaled_dot_product_cudnn_attention_backward", grad, q, k, v, {o, l.squeeze(-1)},
                      bias.defined() ? optional(bias) : std::nullopt, is_causal, scale);
  return {a, b, c};
}

// FlashAttention's entry for packed sequences: sequence i has the tokens starts[i] .. starts[i + 1] - 1 of q, k and v, which are
// [tokens, heads, head_dim]. The log-sum-exp is [heads, tokens].
using Sequences = std::function<void(int64_t first, int64_t count)>;

void for_each_sequence(const Tensor& starts, int64_t longest, const Sequences& visit) {
  const auto* start = starts.const_data_ptr<int32_t>();
  for (int64_t i = 0; i + 1 < starts.numel(); ++i) {
    TORCH_CHECK(start[i + 1] - start[i] <= longest, "virtual GPU: a sequence of ", start[i + 1] - start[i],
                " tokens is longer than the longest that was announced, ", longest);
    visit(start[i], start[i + 1] - start[i]);
  }
}

// Tokens of x [tokens, heads, head_dim] as [1, heads, tokens, head_dim].
Tensor sequence_of(const Tensor& x, int64_t first, int64_t count) {
  return x.narrow(0, first, count).transpose(0, 1).unsqueeze(0);
}

// As the real kernel checks.
void check_packed(const std::vector<Tensor>& packed, const Tensor& starts, const Tensor& starts_of_keys) {
  for (const Tensor& t : packed) {
    TORCH_CHECK(t.dim() == 3 && t.stride(-1) == 1, "Input tensor must have contiguous last dimension");
    TORCH_CHECK(t.scalar_type() == at::kHalf || t.scalar_type() == at::kBFloat16,
                "FlashAttention only support fp16 and bf16 data type");
    TORCH_CHECK(t.size(2) % 8 == 0 && t.size(2) <= 256, "FlashAttention: head size ", t.size(2));
  }
  TORCH_CHECK(starts.data_ptr() == starts_of_keys.data_ptr(),
              "virtual GPU: packed sequences whose queries and keys differ aren't written");
  for (const Tensor& t : {starts, starts_of_keys})
    TORCH_CHECK(t.is_cuda() && t.scalar_type() == at::kInt && t.dim() == 1 && t.is_contiguous(),
                "cu_seqlens must be contiguous int32 on the GPU");
  TORCH_CHECK(starts.numel() <= 65'536, "CUDA error: invalid configuration argument (a grid of ",
              starts.numel() - 1, " documents)");
}

void check_no_window(const optional<c10::SymInt>& left, const optional<c10::SymInt>& right) {
  TORCH_CHECK(left.value_or(-1) == -1 && right.value_or(-1) == -1,
              "virtual GPU: attention within a window isn't written");
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> packed_flash(
    const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& starts,
    const OptionalTensor& starts_of_keys, c10::SymInt longest, c10::SymInt, double dropout, bool is_causal,
    bool, optional<double> scale, optional<c10::SymInt> left, optional<c10::SymInt> right,
    const OptionalTensor& used_keys, const OptionalTensor& slopes) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  check_no_dropout(dropout);
  check_no_window(left, right);
  TORCH_CHECK(!used_keys && !slopes, "virtual GPU: attention with seqused_k or alibi_slopes isn't written");
  TORCH_CHECK(starts && starts_of_keys,
              "virtual GPU: _flash_attention_forward is written for packed sequences only");
  check_packed({q, k, v}, *starts, *starts_of_keys);
  Tensor out = at::empty(q.sizes(), q.options()),
         sums = at::empty({q.size(1), q.size(0)}, q.options().dtype(at::kFloat));
  StandIns memory(StandIns::Kind::cpu);
  const auto cpu = [&](const Tensor& t) { return memory.stand_in(t); };
  run_on_device("aten::_flash_attention_forward", {q, k, v, *starts}, {out, sums},
                [q = cpu(q), k = cpu(k), v = cpu(v), starts = cpu(*starts), out = cpu(out), sums = cpu(sums),
                 longest = longest.expect_int(), is_causal, scale] {
                  const at::AutoDispatchBelowADInplaceOrView below;
                  for_each_sequence(starts, longest, [&](int64_t first, int64_t count) {
                    const auto mine = [&](const Tensor& t) { return sequence_of(t, first, count); };
                    auto [o, l] = at::_scaled_dot_product_flash_attention_for_cpu(mine(q), mine(k), mine(v),
                                                                                  0, is_causal, {}, scale);
                    mine(out).copy_(o);
                    sums.narrow(1, first, count).copy_(l.squeeze(0));
                  });
                });
  const auto [seed, offset] = unused_state(q);
  return {out, sums, seed, offset, Tensor()};
}

std::tuple<Tensor, Tensor, Tensor> packed_flash_backward(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
    const Tensor& sums, const Tensor& starts, const Tensor& starts_of_keys, c10::SymInt longest, c10::SymInt,
    double dropout, bool is_causal, const Tensor&, const Tensor&, optional<double> scale,
    optional<c10::SymInt> left, optional<c10::SymInt> right) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  check_no_dropout(dropout);
  check_no_window(left, right);
  check_packed({grad, q, k, v, out}, starts, starts_of_keys);
  Tensor grad_q = at::empty(q.sizes(), q.options()), grad_k = at::empty(k.sizes(), k.options()),
         grad_v = at::empty(v.sizes(), v.options());
  const std::array<c10::IValue, 7> inputs{grad, q, k, v, out, sums, starts};
  titan::plan::Temporaries temporary = temporaries("aten::_flash_attention_backward", inputs);
  temporary.take_rest();
  StandIns memory(StandIns::Kind::cpu);
  const auto cpu = [&](const Tensor& t) { return memory.stand_in(t); };
  run_on_device("aten::_flash_attention_backward", {grad, q, k, v, out, sums, starts},
                {grad_q, grad_k, grad_v},
                [grad = cpu(grad), q = cpu(q), k = cpu(k), v = cpu(v), out = cpu(out), sums = cpu(sums),
                 starts = cpu(starts), grad_q = cpu(grad_q), grad_k = cpu(grad_k), grad_v = cpu(grad_v),
                 longest = longest.expect_int(), is_causal, scale] {
                  const at::AutoDispatchBelowADInplaceOrView below;
                  for_each_sequence(starts, longest, [&](int64_t first, int64_t count) {
                    const auto mine = [&](const Tensor& t) { return sequence_of(t, first, count); };
                    const auto copy = [&](const Tensor& t) { return dense(mine(t)); };
                    auto [a, b, c] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
                        copy(grad), copy(q), copy(k), copy(v), copy(out),
                        sums.narrow(1, first, count).unsqueeze(0).contiguous(), 0, is_causal, {}, scale);
                    mine(grad_q).copy_(a);
                    mine(grad_k).copy_(b);
                    mine(grad_v).copy_(c);
                  });
                });
  return {grad_q, grad_k, grad_v};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient(const Tensor& q, const Tensor& k, const Tensor& v,
                                                     const OptionalTensor& bias, bool needs_sums,
                                                     double dropout, bool is_causal, optional<double> scale) {
  const char* const name = "aten::_scaled_dot_product_efficient_attention";
  check_no_dropout(dropout);
  check_attention(name, of_efficient, q, k, v);
  for (const Tensor& t : {q, k, v}) check_alignment(name, t);
  auto [o, l] = attend(name, q, k, v, bias, is_causal, scale, 32);  // kernel_forward.h, kAlignLSE
  return {o, needs_sums ? l : l.new_empty({l.size(0), l.size(1), 0}), unused_seed(), unused_seed()};
}
std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_backward(const Tensor& grad, const Tensor& q,
                                                              const Tensor& k, const Tensor& v,
                                                              const Tensor& bias, const Tensor& o,
                                                              const Tensor& l, const Tensor&, const Tensor&,
                                                              double dropout, std::array<bool, 4> needed,
                                                              bool is_causal, optional<double> scale) {
  const char* const name = "aten::_scaled_dot_product_efficient_attention_backward";
  TORCH_CHECK(!needed[3], "virtual GPU: the gradient of an attention bias isn't written");
  check_no_dropout(dropout);
  check_backward(name, of_efficient, grad, q, k, v);
  for (const Tensor& t : {q, k, v}) check_alignment(name, t);
  for (const int64_t dim : {0, 1})
    TORCH_CHECK(l.size(dim) <= 1 || l.stride(dim) % 8 == 0, "LSE is not correctly aligned");
  auto [a, b, c] = attend_backward(name, grad, q, k, v, {o, l.narrow(2, 0, q.size(2))},
                                   bias.defined() ? optional(bias) : std::nullopt, is_causal, scale);
  return {a, b, c, Tensor()};
}

Tensor& multiply(const char* name, const Tensor& a, const Tensor& b, at::ScalarType dtype, Tensor& out) {
  at::cuda::getCurrentCUDABlasHandle();  // takes the workspace
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
  at::cuda::getCurrentCUDABlasHandle();
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
  library->impl("_scaled_dot_product_cudnn_attention", TORCH_FN(cudnn));
  library->impl("_scaled_dot_product_cudnn_attention_backward", TORCH_FN(cudnn_backward));
  if (runs_libtorch()) return;  // the parts of cuDNN that it calls aren't written
  library->impl("_scaled_dot_product_flash_attention", TORCH_FN(flash));
  library->impl("_scaled_dot_product_flash_attention_backward", TORCH_FN(flash_backward));
  library->impl("_flash_attention_forward", TORCH_FN(packed_flash));
  library->impl("_flash_attention_backward", TORCH_FN(packed_flash_backward));
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
