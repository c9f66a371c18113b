#include <torch/library.h>

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include "ops/cpu/dtype.h"
#include "ops/cpu/simd.h"
#include "ops/operators.h"

namespace titan::ops {

namespace {

using simd::Vector;

constexpr int64_t kGrain = 16384;

template <class T>
TITAN_CPU_CLONES void swiglu_range(T* out, const T* gate, const T* up, int64_t count) {
  constexpr int64_t kWidth = simd::kWidth<T>;
  for (int64_t i = 0; i < count; i += kWidth) {
    const Vector<T> a = simd::load_up_to(gate + i, count - i);
    simd::store_up_to(out + i, a * simd::sigmoid(a) * simd::load_up_to(up + i, count - i), count - i);
  }
}

template <class T>
struct SwigluInputs {
  const T *grad, *gate, *up;
};

template <class T>
TITAN_CPU_CLONES void swiglu_backward_range(T* grad_gate, T* grad_up, SwigluInputs<T> in, int64_t count) {
  constexpr int64_t kWidth = simd::kWidth<T>;
  for (int64_t i = 0; i < count; i += kWidth) {
    const int64_t left = count - i;
    const Vector<T> g = simd::load_up_to(in.grad + i, left), a = simd::load_up_to(in.gate + i, left),
                    b = simd::load_up_to(in.up + i, left);
    const Vector<T> s = simd::sigmoid(a);
    simd::store_up_to(grad_gate + i, g * b * s * (1 + a * (1 - s)), left);
    simd::store_up_to(grad_up + i, g * a * s, left);
  }
}

at::Tensor swiglu_cpu(const at::Tensor& gate, const at::Tensor& up) {
  if (!cpu::have_kernel(gate, up)) return composite::swiglu(gate, up);
  const at::Tensor a = gate.contiguous(), b = up.contiguous();
  at::Tensor out = at::empty(gate.sizes(), gate.options());
  cpu::dispatch(gate, [&]<class T>(T*) {
    at::parallel_for(0, out.numel(), kGrain, [&](int64_t begin, int64_t end) {
      swiglu_range<T>(out.mutable_data_ptr<T>() + begin, a.const_data_ptr<T>() + begin,
                      b.const_data_ptr<T>() + begin, end - begin);
    });
  });
  return out;
}

std::tuple<at::Tensor, at::Tensor> swiglu_backward_cpu(const at::Tensor& grad, const at::Tensor& gate,
                                                       const at::Tensor& up) {
  if (!cpu::have_kernel(gate, up, grad)) return composite::swiglu_backward(grad, gate, up);
  const at::Tensor g = grad.contiguous(), a = gate.contiguous(), b = up.contiguous();
  at::Tensor grad_gate = at::empty(gate.sizes(), gate.options()),
             grad_up = at::empty(up.sizes(), up.options());
  cpu::dispatch(gate, [&]<class T>(T*) {
    at::parallel_for(0, g.numel(), kGrain, [&](int64_t begin, int64_t end) {
      swiglu_backward_range<T>(
          grad_gate.mutable_data_ptr<T>() + begin, grad_up.mutable_data_ptr<T>() + begin,
          {g.const_data_ptr<T>() + begin, a.const_data_ptr<T>() + begin, b.const_data_ptr<T>() + begin},
          end - begin);
    });
  });
  return {grad_gate, grad_up};
}

TORCH_LIBRARY_IMPL(titan, CPU, m) {
  m.impl("swiglu", swiglu_cpu);
  m.impl("swiglu_backward", swiglu_backward_cpu);
}

}  // namespace
}  // namespace titan::ops
