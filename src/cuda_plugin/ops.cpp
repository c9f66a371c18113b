// titan::rms_norm and the other operations on a GPU: takes LibTorch's tensors and launches the kernels in ops_kernels.cu.
// What the kernels don't take, such as float64, rows that aren't a multiple of 16 bytes long, or GPUs before compute
// capability 8.0, runs as a composite of LibTorch's operations.

#include "cuda_plugin/ops_kernels.h"

#include <algorithm>

#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "cuda_plugin/adam_kernels.h"
#include "ops/operators.h"
#include "titan/ops/loss.h"

namespace titan::ops {

namespace {

using at::Tensor;

constexpr size_t kPackBytes = 16;

const cudaDeviceProp& properties_of(const Tensor& x) {
  return *at::cuda::getDeviceProperties(x.device().index());
}

bool begins_at_pack(const Tensor& x) {
  return reinterpret_cast<uintptr_t>(x.const_data_ptr()) % kPackBytes == 0;
}

// Whether kernels take rows of this tensor.
bool has_rows(const Tensor& x) {
  const bool known = x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16;
  return known && x.dim() > 0 && x.numel() > 0 && properties_of(x).major >= 8 &&
         static_cast<size_t>(x.size(-1)) * x.element_size() % kPackBytes == 0;
}

int64_t row_bytes(const Tensor& x) { return x.size(-1) * static_cast<int64_t>(x.element_size()); }

bool has_norm_rows(const Tensor& x, const Tensor& weight) {
  return has_rows(x) && weight.scalar_type() == x.scalar_type() && row_bytes(x) <= cuda::kMaxNormBytes;
}

// Contiguous, and at a place where packs begin.
Tensor packed(const Tensor& x) {
  const Tensor rows = x.contiguous();
  return begins_at_pack(rows) ? rows : rows.clone();
}

cuda::Source source_of(const Tensor& x) {
  return x.scalar_type() == at::kFloat ? cuda::Source::Float : cuda::Source::BFloat16;
}

Tensor fp32_like(const Tensor& x, at::IntArrayRef sizes) {
  return at::empty(sizes, x.options().dtype(at::kFloat));
}

Tensor rstd_of(const Tensor& x) { return fp32_like(x, x.sizes().slice(0, static_cast<size_t>(x.dim()) - 1)); }

cuda::NormRows norm_rows(const Tensor& x, const Tensor& weight) {
  return {.x = x.const_data_ptr(),
          .weight = weight.const_data_ptr(),
          .source = source_of(x),
          .rows = x.numel() / x.size(-1),
          .size = x.size(-1)};
}

std::tuple<Tensor, Tensor> rms_norm_cuda(const Tensor& x, const Tensor& weight, double eps) {
  if (!has_norm_rows(x, weight)) return composite::rms_norm(x, weight, eps);
  const c10::cuda::CUDAGuard guard(x.device());
  const Tensor from = packed(x), scales = packed(weight);
  Tensor y = at::empty(x.sizes(), x.options());
  Tensor rstd = rstd_of(x);
  cuda::launch_rms_norm(y.mutable_data_ptr(), rstd.mutable_data_ptr<float>(), norm_rows(from, scales),
                        static_cast<float>(eps), c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return {y, rstd};
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm_cuda(const Tensor& x, const Tensor& added,
                                                     const Tensor& weight, double eps) {
  if (!has_norm_rows(x, weight) || added.scalar_type() != x.scalar_type())
    return composite::add_rms_norm(x, added, weight, eps);
  const c10::cuda::CUDAGuard guard(x.device());
  const Tensor from = packed(x), other = packed(added), scales = packed(weight);
  Tensor y = at::empty(x.sizes(), x.options()), sum = at::empty(x.sizes(), x.options());
  Tensor rstd = rstd_of(x);
  cuda::launch_add_rms_norm(y.mutable_data_ptr(), rstd.mutable_data_ptr<float>(), sum.mutable_data_ptr(),
                            other.const_data_ptr(), norm_rows(from, scales), static_cast<float>(eps),
                            c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return {y, rstd, sum};
}

// Each thread block sums the weight's gradient over some of the rows. `added`: undefined, or what is added to x's gradient.
std::tuple<Tensor, Tensor> norm_gradients(const Tensor& grad, const Tensor& added, const Tensor& x,
                                          const Tensor& weight, const Tensor& rstd) {
  const c10::cuda::CUDAGuard guard(x.device());
  const Tensor g = packed(grad), other = added.defined() ? packed(added) : added, from = packed(x),
               scales = packed(weight), r = rstd.contiguous();
  const cuda::NormRows rows = norm_rows(from, scales);
  const int64_t parts = std::min<int64_t>(
      rows.rows, cuda::norm_backward_blocks(row_bytes(x)) * properties_of(x).multiProcessorCount);
  Tensor grad_x = at::empty(x.sizes(), x.options()), grad_weight = fp32_like(x, weight.sizes());
  const Tensor sums = fp32_like(x, {parts, rows.size});
  cuda::launch_rms_norm_backward({.grad_x = grad_x.mutable_data_ptr(),
                                  .grad_weight = grad_weight.mutable_data_ptr<float>(),
                                  .parts = sums.mutable_data_ptr<float>(),
                                  .num_parts = parts},
                                 g.const_data_ptr(), other.defined() ? other.const_data_ptr() : nullptr, rows,
                                 r.const_data_ptr<float>(), c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return {grad_x, grad_weight};
}

std::tuple<Tensor, Tensor> rms_norm_backward_cuda(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                                  const Tensor& rstd) {
  if (!has_norm_rows(x, weight) || grad.scalar_type() != x.scalar_type())
    return composite::rms_norm_backward(grad, x, weight, rstd);
  return norm_gradients(grad, {}, x, weight, rstd);
}

std::tuple<Tensor, Tensor> add_rms_norm_backward_cuda(const Tensor& grad, const Tensor& grad_sum,
                                                      const Tensor& sum, const Tensor& weight,
                                                      const Tensor& rstd) {
  if (!has_norm_rows(sum, weight) || grad.scalar_type() != sum.scalar_type() ||
      grad_sum.scalar_type() != sum.scalar_type())
    return composite::add_rms_norm_backward(grad, grad_sum, sum, weight, rstd);
  return norm_gradients(grad, grad_sum, sum, weight, rstd);
}

std::vector<Tensor> rotary_cuda(at::TensorList x, const Tensor& table, const std::optional<Tensor>& positions,
                                bool inverse) {
  const auto is_taken = [&](const Tensor& each) {
    return has_rows(each) && row_bytes(each) <= cuda::kMaxRotatedBytes &&
           each.scalar_type() == x[0].scalar_type();
  };
  if (x.size() > 2 || !std::all_of(x.begin(), x.end(), is_taken))
    return composite::rotary(x, table, positions, inverse);
  const Tensor& first = x[0];
  const c10::cuda::CUDAGuard guard(first.device());
  const Tensor angles = packed(table.to(at::kFloat));
  const Tensor places = positions ? positions->contiguous() : Tensor();
  std::vector<Tensor> in, out;
  for (const Tensor& each : x) {
    in.push_back(packed(each));
    out.push_back(at::empty(each.sizes(), each.options()));
  }
  const auto heads = [&](size_t i) -> cuda::Rotation::Heads {
    if (i >= x.size()) return {};
    return {.out = out[i].mutable_data_ptr(), .x = in[i].const_data_ptr(), .heads = in[i].size(2)};
  };
  cuda::launch_rotary({.first = heads(0),
                       .second = heads(1),
                       .source = source_of(first),
                       .tokens = first.size(0) * first.size(1),
                       .size = first.size(3),
                       .table = angles.const_data_ptr<float>(),
                       .table_rows = table.size(0),
                       .positions = positions ? places.const_data_ptr<int64_t>() : nullptr,
                       .num_positions = positions ? places.numel() : first.size(1),
                       .inverse = inverse},
                      c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}

cuda::GateAndUp gate_and_up(const Tensor& gate, const Tensor& up) {
  return {.gate = gate.const_data_ptr(),
          .up = up.const_data_ptr(),
          .source = source_of(gate),
          .count = gate.numel()};
}

Tensor swiglu_cuda(const Tensor& gate, const Tensor& up) {
  if (!has_rows(gate)) return composite::swiglu(gate, up);
  const c10::cuda::CUDAGuard guard(gate.device());
  const Tensor a = packed(gate), b = packed(up);
  Tensor out = at::empty(gate.sizes(), gate.options());
  cuda::launch_swiglu(out.mutable_data_ptr(), gate_and_up(a, b), c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}

// out: undefined, or where swiglu's output is written.
std::tuple<Tensor, Tensor> swiglu_gradients(const Tensor& grad, const Tensor& gate, const Tensor& up,
                                            const Tensor& out) {
  const c10::cuda::CUDAGuard guard(gate.device());
  const Tensor g = packed(grad), a = packed(gate), b = packed(up);
  Tensor grad_gate = at::empty(gate.sizes(), gate.options()), grad_up = at::empty(up.sizes(), up.options());
  cuda::launch_swiglu_backward({.grad_gate = grad_gate.mutable_data_ptr(),
                                .grad_up = grad_up.mutable_data_ptr(),
                                .out = out.defined() ? out.mutable_data_ptr() : nullptr},
                               g.const_data_ptr(), gate_and_up(a, b), c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return {grad_gate, grad_up};
}

std::tuple<Tensor, Tensor> swiglu_backward_cuda(const Tensor& grad, const Tensor& gate, const Tensor& up) {
  if (!has_rows(gate) || grad.scalar_type() != gate.scalar_type())
    return composite::swiglu_backward(grad, gate, up);
  return swiglu_gradients(grad, gate, up, {});
}

std::tuple<Tensor, Tensor, Tensor> swiglu_with_backward_cuda(const Tensor& grad, const Tensor& gate,
                                                             const Tensor& up) {
  if (!has_rows(gate) || grad.scalar_type() != gate.scalar_type())
    return composite::swiglu_with_backward(grad, gate, up);
  const Tensor out = at::empty(gate.sizes(), gate.options());
  auto [grad_gate, grad_up] = swiglu_gradients(grad, gate, up, out);
  return {out, grad_gate, grad_up};
}

// Whether kernels take rows of x [B, S, H, D] at these strides.
bool has_strided_rows(const Tensor& x) {
  const int64_t pack = static_cast<int64_t>(kPackBytes) / x.element_size();
  const auto is_at_pack = [&](int64_t dim) { return x.stride(dim) % pack == 0; };
  return has_rows(x) && begins_at_pack(x) && x.stride(3) == 1 && is_at_pack(0) && is_at_pack(1) &&
         is_at_pack(2);
}

void merge_attention_cuda(Tensor& out, Tensor& log_sum_exp, const Tensor& part,
                          const Tensor& part_log_sum_exp) {
  const auto is_fp32 = [](const Tensor& x) { return x.scalar_type() == at::kFloat; };
  if (!is_fp32(out) || !is_fp32(log_sum_exp) || !is_fp32(part_log_sum_exp) || !has_strided_rows(out) ||
      !has_strided_rows(part) || row_bytes(part) > cuda::kMaxHeadBytes)
    return composite::merge_attention_(out, log_sum_exp, part, part_log_sum_exp);
  const c10::cuda::CUDAGuard guard(out.device());
  const auto of_heads = [](const Tensor& x) -> cuda::AttentionPart::Strides {
    return {.batch = x.stride(0), .token = x.stride(1), .head = x.stride(2)};
  };
  const auto of_sums = [](const Tensor& x) -> cuda::AttentionPart::Strides {
    return {.batch = x.stride(0), .token = x.stride(2), .head = x.stride(1)};
  };
  cuda::launch_merge_attention({.out = out.mutable_data_ptr<float>(),
                                .log_sum_exp = log_sum_exp.mutable_data_ptr<float>(),
                                .part = part.const_data_ptr(),
                                .source = source_of(part),
                                .part_log_sum_exp = part_log_sum_exp.const_data_ptr<float>(),
                                .batch = out.size(0),
                                .tokens = out.size(1),
                                .heads = out.size(2),
                                .size = out.size(3),
                                .of_out = of_heads(out),
                                .of_sums = of_sums(log_sum_exp),
                                .of_part = of_heads(part),
                                .of_part_sums = of_sums(part_log_sum_exp)},
                               c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

Tensor sum_of_parts_cuda(at::TensorList parts) {
  const Tensor& first = parts.front();
  const bool fits = parts.size() <= cuda::kMaxParts && has_rows(first) &&
                    std::all_of(parts.begin(), parts.end(), [&](const Tensor& part) {
                      return part.scalar_type() == first.scalar_type() && part.sizes() == first.sizes() &&
                             part.is_contiguous() && begins_at_pack(part);
                    });
  if (!fits) return composite::sum_of_parts(parts);
  const c10::cuda::CUDAGuard guard(first.device());
  Tensor sum = at::empty(first.sizes(), first.options());
  cuda::SumOfParts in{.out = sum.mutable_data_ptr(),
                      .source = source_of(first),
                      .size = first.numel(),
                      .num_parts = static_cast<int>(parts.size())};
  for (size_t i = 0; i < parts.size(); ++i) in.parts[i] = parts[i].const_data_ptr();
  cuda::launch_sum_of_parts(in, c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return sum;
}

// Logits are written in place, so they must be where kernels take them.
bool has_logit_rows(const Tensor& logits) {
  return has_rows(logits) && logits.is_contiguous() && begins_at_pack(logits);
}

cuda::LogitRows logit_rows(const Tensor& logits, const Tensor& labels, int64_t first) {
  return {.logits = const_cast<void*>(logits.const_data_ptr()),
          .source = source_of(logits),
          .labels = labels.const_data_ptr<int64_t>(),
          .rows = logits.size(0),
          .columns = logits.size(1),
          .first = first,
          .ignored_label = kIgnoredLabel};
}

Tensor cross_entropy_cuda(Tensor& logits, const Tensor& labels, bool with_grad) {
  if (!has_logit_rows(logits)) return composite::cross_entropy_(logits, labels, with_grad);
  const c10::cuda::CUDAGuard guard(logits.device());
  const Tensor targets = labels.contiguous();
  Tensor losses = at::empty({logits.size(0)}, logits.options().dtype(at::kDouble));
  cuda::launch_cross_entropy(losses.mutable_data_ptr<double>(), logit_rows(logits, targets, 0), with_grad,
                             c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return losses.sum();
}

Tensor vocabulary_stats_cuda(const Tensor& logits, const Tensor& labels, int64_t first) {
  if (!has_logit_rows(logits)) return composite::vocabulary_stats(logits, labels, first);
  const c10::cuda::CUDAGuard guard(logits.device());
  const Tensor targets = labels.contiguous();
  Tensor stats = at::empty({2, logits.size(0)}, logits.options().dtype(at::kDouble));
  auto* out = stats.mutable_data_ptr<double>();
  cuda::launch_vocabulary_stats(out, out + logits.size(0), logit_rows(logits, targets, first),
                                c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return stats;
}

void vocabulary_grad_cuda(Tensor& logits, const Tensor& labels, int64_t first, const Tensor& log_sum,
                          const std::optional<Tensor>& factors) {
  if (!has_logit_rows(logits)) return composite::vocabulary_grad_(logits, labels, first, log_sum, factors);
  const c10::cuda::CUDAGuard guard(logits.device());
  const Tensor targets = labels.contiguous(), sums = log_sum.contiguous(),
               factors_3N = factors ? factors->contiguous() : Tensor();
  const int64_t count = logits.size(0);
  cuda::GradientFactors of_rows;
  if (factors) {
    const auto* data = factors_3N.const_data_ptr<double>();
    of_rows = {.by_softmax = data, .by_target = data + count, .by_any = data + 2 * count};
  }
  cuda::launch_vocabulary_grad(logit_rows(logits, targets, first), sums.const_data_ptr<double>(), of_rows,
                               c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

template <class T>
const T* data_or_null(const std::optional<Tensor>& x) {
  return x ? x->const_data_ptr<T>() : nullptr;
}

void adam_cuda(at::TensorList params, at::TensorList grads, at::TensorList exp_avgs,
               at::TensorList exp_avg_sqs, at::TensorList steps, at::IntArrayRef places, double lr,
               double beta1, double beta2, double weight_decay, double eps, bool decoupled, bool stochastic,
               const std::optional<Tensor>& grad_factor, const std::optional<Tensor>& skip,
               const std::optional<Tensor>& lr_on_device) {
  if (params.empty()) return;
  if (properties_of(params[0]).major < 8)
    return composite::adam_(params, grads, exp_avgs, exp_avg_sqs, steps, places, lr, beta1, beta2,
                            weight_decay, eps, decoupled, stochastic, grad_factor, skip, lr_on_device);
  composite::check_adam(params, grads, exp_avgs, exp_avg_sqs, places);
  const c10::cuda::CUDAGuard guard(params[0].device());
  cuda::AdamTensors launch{};
  const auto flush = [&] {
    if (launch.num_tensors == 0) return;
    cuda::launch_adam(launch, {source_of(params[0]), source_of(exp_avgs[0])},
                      {lr, beta1, beta2, weight_decay, eps, decoupled, stochastic},
                      data_or_null<double>(grad_factor), data_or_null<float>(skip),
                      data_or_null<float>(lr_on_device), c10::cuda::getCurrentCUDAStream());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    launch.num_tensors = 0;
  };
  for (size_t i = 0; i < params.size(); ++i) {
    if (params[i].numel() == 0) continue;
    launch.tensors[launch.num_tensors++] = {.param = params[i].mutable_data_ptr(),
                                            .grad = grads[i].const_data_ptr(),
                                            .exp_avg = exp_avgs[i].mutable_data_ptr(),
                                            .exp_avg_sq = exp_avg_sqs[i].mutable_data_ptr(),
                                            .step = steps[i].const_data_ptr<float>(),
                                            .count = params[i].numel(),
                                            .place = composite::adam_place(places, i)};
    if (launch.num_tensors == cuda::AdamTensors::kMaxTensors) flush();
  }
  flush();
}

TORCH_LIBRARY_IMPL(titan, CUDA, m) {
  m.impl("rms_norm", rms_norm_cuda);
  m.impl("rms_norm_backward", rms_norm_backward_cuda);
  m.impl("add_rms_norm", add_rms_norm_cuda);
  m.impl("add_rms_norm_backward", add_rms_norm_backward_cuda);
  m.impl("rotary", rotary_cuda);
  m.impl("swiglu", swiglu_cuda);
  m.impl("swiglu_backward", swiglu_backward_cuda);
  m.impl("swiglu_with_backward", swiglu_with_backward_cuda);
  m.impl("merge_attention_", merge_attention_cuda);
  m.impl("sum_of_parts", sum_of_parts_cuda);
  m.impl("cross_entropy_", cross_entropy_cuda);
  m.impl("vocabulary_stats", vocabulary_stats_cuda);
  m.impl("vocabulary_grad_", vocabulary_grad_cuda);
  m.impl("adam_", adam_cuda);
}

}  // namespace
}  // namespace titan::ops
