// The operations of titan/ops/functional.h on a CPU, except attention.

#include <algorithm>

#include <torch/library.h>

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "ops/cpu/simd.h"
#include "ops/operators.h"
#include "titan/core/error.h"

namespace titan::ops {

namespace {

using simd::Doubles;
using simd::Floats;
using simd::Scalar;
using simd::Vector;

// ---- embedding

template <class T>
struct TokenGradients {
  const T* grad;
  const int64_t* tokens;
  int64_t count, size;
};

// Adds the columns [begin, end) of every token's gradient to its row, in token order.
template <class T>
TITAN_CPU_CLONES void add_columns(Scalar<T>* out, TokenGradients<T> in, int64_t begin, int64_t end) {
  constexpr int64_t kWidth = simd::kWidth<T>;
  for (int64_t token = 0; token < in.count; ++token) {
    Scalar<T>* row = out + in.tokens[token] * in.size;
    const T* from = in.grad + token * in.size;
    for (int64_t i = begin; i < end; i += kWidth)
      simd::store_up_to(row + i, simd::load_up_to(row + i, end - i) + simd::load_up_to(from + i, end - i),
                        end - i);
  }
}

// Threads divide the columns, not the tokens, so no two threads write to one element, and each row is summed
// in token order with any number of threads.
at::Tensor embedding_backward_cpu(const at::Tensor& grad, const at::Tensor& tokens, int64_t num_embeddings) {
  if (!cpu::have_kernel(grad)) return composite::embedding_backward(grad, tokens, num_embeddings);
  constexpr int64_t kColumns = 64;
  const at::Tensor rows = grad.contiguous(), ids = tokens.contiguous();
  const int64_t size = grad.size(-1);
  at::Tensor out = at::zeros({num_embeddings, size}, grad.options().dtype(composite::accumulate_type(grad)));
  cpu::dispatch(grad, [&]<class T>(T*) {
    at::parallel_for(0, (size + kColumns - 1) / kColumns, 1, [&](int64_t begin, int64_t end) {
      add_columns<T>(out.mutable_data_ptr<Scalar<T>>(),
                     {rows.const_data_ptr<T>(), ids.const_data_ptr<int64_t>(), ids.numel(), size},
                     begin * kColumns, std::min(end * kColumns, size));
    });
  });
  return out;
}

// ---- RMS norm

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

// ---- rotary positions

TITAN_INLINE Floats swap_pairs(Floats v) { return __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6); }
TITAN_INLINE Doubles swap_pairs(Doubles v) { return __builtin_shufflevector(v, v, 1, 0, 3, 2); }

// The factors of one position, in the layout that rotate_heads reads.
template <class S>
class PairFactors {
 public:
  explicit PairFactors(int64_t size) : cos_(static_cast<size_t>(size)), sin_(static_cast<size_t>(size)) {}
  void set(const S* row, bool inverse) {
    for (size_t i = 0; i + 1 < cos_.size(); i += 2) {
      const S sine = inverse ? -row[i + 1] : row[i + 1];
      cos_[i] = cos_[i + 1] = row[i];
      sin_[i] = -sine;
      sin_[i + 1] = sine;
    }
  }
  TITAN_INLINE int64_t size() const { return static_cast<int64_t>(cos_.size()); }
  TITAN_INLINE const S* cos() const { return cos_.data(); }
  TITAN_INLINE const S* sin() const { return sin_.data(); }

 private:
  std::vector<S> cos_, sin_;
};

// `cos` holds (c, c) for each pair, `sin` (-s, s): out = x * cos + swapped(x) * sin.
template <class T>
TITAN_CPU_CLONES void rotate_heads(T* out, const T* x, int64_t heads, const PairFactors<Scalar<T>>& factors) {
  constexpr int64_t kWidth = simd::kWidth<T>;
  const Scalar<T>*cos = factors.cos(), *sin = factors.sin();
  const int64_t size = factors.size();
  for (int64_t head = 0; head < heads; ++head, x += size, out += size) {
    for (int64_t i = 0; i < size; i += kWidth) {
      const Vector<T> v = simd::load_up_to(x + i, size - i);
      const Vector<T> c = simd::load_up_to(cos + i, size - i), s = simd::load_up_to(sin + i, size - i);
      simd::store_up_to(out + i, v * c + swap_pairs(v) * s, size - i);
    }
  }
}

std::vector<at::Tensor> rotary_cpu(at::TensorList x, const at::Tensor& table,
                                   const std::optional<at::Tensor>& positions, bool inverse) {
  const at::Tensor& first = x[0];
  const int64_t num_tokens = first.size(0) * first.size(1), seq_len = first.size(1), size = first.size(3),
                table_rows = table.size(0);
  int64_t row_size = 0;  // a token's, over all tensors
  std::vector<at::Tensor> in, out;
  for (const at::Tensor& each : x) {
    if (!cpu::have_kernel(first, each)) return composite::rotary(x, table, positions, inverse);
    row_size += each.size(2) * size;
    in.push_back(each.contiguous());
    out.push_back(at::empty(each.sizes(), each.options()));
  }
  const at::Tensor rows = table.to(composite::accumulate_type(first)).contiguous();
  const at::Tensor at_positions =
      positions ? positions->expand({first.size(0), seq_len}).contiguous() : at::Tensor();
  const int64_t* position_of = positions ? at_positions.const_data_ptr<int64_t>() : nullptr;
  cpu::dispatch(first, [&]<class T>(T*) {
    const auto* table_data = rows.const_data_ptr<Scalar<T>>();
    at::parallel_for(0, num_tokens, 1 + 16384 / (row_size + 1), [&](int64_t begin, int64_t end) {
      PairFactors<Scalar<T>> factors(size);
      for (int64_t token = begin; token < end; ++token) {
        const int64_t position = position_of ? position_of[token] : token % seq_len;
        TITAN_CHECK(position >= 0 && position < table_rows, "rotary: position ", position,
                    " isn't in the table of ", table_rows);
        factors.set(table_data + position * size, inverse);
        for (size_t i = 0; i < in.size(); ++i) {
          const int64_t heads = in[i].size(2), start = token * heads * size;
          rotate_heads<T>(out[i].mutable_data_ptr<T>() + start, in[i].const_data_ptr<T>() + start, heads,
                          factors);
        }
      }
    });
  });
  return out;
}

// ---- SwiGLU

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
struct SwigluOutputs {
  T *grad_gate, *grad_up;
  T* out;  // swiglu's own; null: not wanted
};

template <class T>
TITAN_CPU_CLONES void swiglu_backward_range(SwigluOutputs<T> to, SwigluInputs<T> in, int64_t count) {
  constexpr int64_t kWidth = simd::kWidth<T>;
  for (int64_t i = 0; i < count; i += kWidth) {
    const int64_t left = count - i;
    const Vector<T> g = simd::load_up_to(in.grad + i, left), a = simd::load_up_to(in.gate + i, left),
                    b = simd::load_up_to(in.up + i, left);
    const Vector<T> s = simd::sigmoid(a);
    simd::store_up_to(to.grad_gate + i, g * b * s * (1 + a * (1 - s)), left);
    simd::store_up_to(to.grad_up + i, g * a * s, left);
    if (to.out) simd::store_up_to(to.out + i, a * s * b, left);
  }
}

at::Tensor swiglu_cpu(const at::Tensor& gate, const at::Tensor& up) {
  if (!cpu::have_kernel(gate, up)) return composite::swiglu(gate, up);
  const at::Tensor a = gate.contiguous(), b = up.contiguous();
  at::Tensor out = at::empty(gate.sizes(), gate.options());
  cpu::dispatch(gate, [&]<class T>(T*) {
    at::parallel_for(0, out.numel(), /*grain_size=*/16384, [&](int64_t begin, int64_t end) {
      swiglu_range<T>(out.mutable_data_ptr<T>() + begin, a.const_data_ptr<T>() + begin,
                      b.const_data_ptr<T>() + begin, end - begin);
    });
  });
  return out;
}

// out: undefined, or where swiglu's output is written.
std::tuple<at::Tensor, at::Tensor> swiglu_gradients(const at::Tensor& grad, const at::Tensor& gate,
                                                    const at::Tensor& up, const at::Tensor& out) {
  const at::Tensor g = grad.contiguous(), a = gate.contiguous(), b = up.contiguous();
  at::Tensor grad_gate = at::empty(gate.sizes(), gate.options()),
             grad_up = at::empty(up.sizes(), up.options());
  cpu::dispatch(gate, [&]<class T>(T*) {
    at::parallel_for(0, g.numel(), /*grain_size=*/16384, [&](int64_t begin, int64_t end) {
      swiglu_backward_range<T>(
          {grad_gate.mutable_data_ptr<T>() + begin, grad_up.mutable_data_ptr<T>() + begin,
           out.defined() ? out.mutable_data_ptr<T>() + begin : nullptr},
          {g.const_data_ptr<T>() + begin, a.const_data_ptr<T>() + begin, b.const_data_ptr<T>() + begin},
          end - begin);
    });
  });
  return {grad_gate, grad_up};
}

std::tuple<at::Tensor, at::Tensor> swiglu_backward_cpu(const at::Tensor& grad, const at::Tensor& gate,
                                                       const at::Tensor& up) {
  if (!cpu::have_kernel(gate, up, grad)) return composite::swiglu_backward(grad, gate, up);
  return swiglu_gradients(grad, gate, up, {});
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> swiglu_with_backward_cpu(const at::Tensor& grad,
                                                                        const at::Tensor& gate,
                                                                        const at::Tensor& up) {
  if (!cpu::have_kernel(gate, up, grad)) return composite::swiglu_with_backward(grad, gate, up);
  const at::Tensor out = at::empty(gate.sizes(), gate.options());
  auto [grad_gate, grad_up] = swiglu_gradients(grad, gate, up, out);
  return {out, grad_gate, grad_up};
}

TORCH_LIBRARY_IMPL(titan, CPU, m) {
  m.impl("embedding_backward", embedding_backward_cpu);
  m.impl("rms_norm", rms_norm_cpu);
  m.impl("rms_norm_backward", rms_norm_backward_cpu);
  m.impl("rotary", rotary_cpu);
  m.impl("swiglu", swiglu_cpu);
  m.impl("swiglu_backward", swiglu_backward_cpu);
  m.impl("swiglu_with_backward", swiglu_with_backward_cpu);
}

}  // namespace
}  // namespace titan::ops
