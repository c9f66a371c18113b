#include <algorithm>

#include <torch/library.h>

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include "ops/cpu/dtype.h"
#include "ops/cpu/simd.h"
#include "ops/operators.h"

namespace titan::ops {

namespace {

using simd::Scalar;
using simd::Vector;

template <class T>
TITAN_INLINE Scalar<T> sum_of_squares(const T* x, int64_t size) {
  constexpr int64_t kWidth = simd::kWidth<T>;
  Vector<T> first{}, second{};
  int64_t i = 0;
  for (; i + 2 * kWidth <= size; i += 2 * kWidth) {
    const Vector<T> a = simd::load(x + i), b = simd::load(x + i + kWidth);
    first += a * a;
    second += b * b;
  }
  for (; i < size; i += kWidth) {
    const Vector<T> a = simd::load_up_to(x + i, size - i);
    first += a * a;
  }
  return simd::sum(first + second);
}

template <class T>
struct NormRows {
  const T *x, *weight;
  int64_t count, size;
};

template <class T>
TITAN_CPU_CLONES void rms_norm_rows(T* y, Scalar<T>* rstd, NormRows<T> in, double eps) {
  constexpr int64_t kWidth = simd::kWidth<T>;
  const int64_t size = in.size;
  const T *x = in.x, *weight = in.weight;
  for (int64_t row = 0; row < in.count; ++row, x += size, y += size) {
    const Scalar<T> mean = sum_of_squares(x, size) / static_cast<Scalar<T>>(size);
    const Scalar<T> scale = 1 / std::sqrt(mean + static_cast<Scalar<T>>(eps));
    rstd[row] = scale;
    for (int64_t i = 0; i < size; i += kWidth)
      simd::store_up_to(y + i,
                        simd::load_up_to(x + i, size - i) * scale * simd::load_up_to(weight + i, size - i),
                        size - i);
  }
}

// With n = x * rstd and h = grad * weight: grad_x = rstd * (h - n * mean(h * n)), grad_weight += grad * n.
template <class T>
TITAN_CPU_CLONES void rms_norm_backward_rows(T* grad_x, Scalar<T>* grad_weight, const T* grad, NormRows<T> in,
                                             const Scalar<T>* rstd) {
  constexpr int64_t kWidth = simd::kWidth<T>;
  const int64_t size = in.size;
  const T *x = in.x, *weight = in.weight;
  for (int64_t row = 0; row < in.count; ++row, x += size, grad += size, grad_x += size) {
    const Scalar<T> scale = rstd[row];
    Vector<T> dot{};
    for (int64_t i = 0; i < size; i += kWidth) {
      const int64_t left = size - i;
      const Vector<T> g = simd::load_up_to(grad + i, left), n = simd::load_up_to(x + i, left) * scale;
      dot += g * simd::load_up_to(weight + i, left) * n;
      simd::store_up_to(grad_weight + i, simd::load_up_to(grad_weight + i, left) + g * n, left);
    }
    const Scalar<T> mean = simd::sum(dot) / static_cast<Scalar<T>>(size);
    for (int64_t i = 0; i < size; i += kWidth) {
      const int64_t left = size - i;
      const Vector<T> h = simd::load_up_to(grad + i, left) * simd::load_up_to(weight + i, left);
      const Vector<T> n = simd::load_up_to(x + i, left) * scale;
      simd::store_up_to(grad_x + i, (h - n * mean) * scale, left);
    }
  }
}

int64_t row_grain(int64_t size) { return std::max<int64_t>(1, 16384 / std::max<int64_t>(size, 1)); }

std::tuple<at::Tensor, at::Tensor> rms_norm_cpu(const at::Tensor& x, const at::Tensor& weight, double eps) {
  if (!cpu::have_kernel(x, weight)) return composite::rms_norm(x, weight, eps);
  const at::Tensor in = x.contiguous(), scales = weight.contiguous();
  const int64_t size = x.size(-1), rows = size == 0 ? 0 : x.numel() / size;
  at::Tensor y = at::empty(x.sizes(), x.options());
  at::Tensor rstd =
      at::empty(x.sizes().slice(0, x.dim() - 1), x.options().dtype(composite::accumulate_type(x)));
  cpu::dispatch(x, [&]<class T>(T*) {
    const T *from = in.const_data_ptr<T>(), *w = scales.const_data_ptr<T>();
    T* to = y.mutable_data_ptr<T>();
    auto* out_rstd = rstd.mutable_data_ptr<Scalar<T>>();
    at::parallel_for(0, rows, row_grain(size), [&](int64_t begin, int64_t end) {
      rms_norm_rows<T>(to + begin * size, out_rstd + begin, {from + begin * size, w, end - begin, size}, eps);
    });
  });
  return {y, rstd};
}

// The weight's gradient is summed within blocks of rows and then over the blocks, so that its bits don't
// depend on the number of threads.
std::tuple<at::Tensor, at::Tensor> rms_norm_backward_cpu(const at::Tensor& grad, const at::Tensor& x,
                                                         const at::Tensor& weight, const at::Tensor& rstd) {
  if (!cpu::have_kernel(x, weight) || grad.scalar_type() != x.scalar_type())
    return composite::rms_norm_backward(grad, x, weight, rstd);
  constexpr int64_t kMaxBlocks = 64;
  const at::Tensor g = grad.contiguous(), in = x.contiguous(), scales = weight.contiguous(),
                   r = rstd.contiguous();
  const int64_t size = x.size(-1), rows = size == 0 ? 0 : x.numel() / size;
  const int64_t block_rows = std::max<int64_t>(row_grain(size), (rows + kMaxBlocks - 1) / kMaxBlocks);
  const int64_t blocks = (rows + block_rows - 1) / block_rows;
  at::Tensor grad_x = at::empty(x.sizes(), x.options());
  at::Tensor partial = at::zeros({blocks, size}, rstd.options());
  cpu::dispatch(x, [&]<class T>(T*) {
    at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        const int64_t first = block * block_rows, count = std::min(block_rows, rows - first);
        rms_norm_backward_rows<T>(
            grad_x.mutable_data_ptr<T>() + first * size, partial.mutable_data_ptr<Scalar<T>>() + block * size,
            g.const_data_ptr<T>() + first * size,
            {in.const_data_ptr<T>() + first * size, scales.const_data_ptr<T>(), count, size},
            r.const_data_ptr<Scalar<T>>() + first);
      }
    });
  });
  return {grad_x, blocks == 1 ? partial[0] : partial.sum(0)};
}

TORCH_LIBRARY_IMPL(titan, CPU, m) {
  m.impl("rms_norm", rms_norm_cpu);
  m.impl("rms_norm_backward", rms_norm_backward_cpu);
}

}  // namespace
}  // namespace titan::ops
