// So far these have run on virtual GPUs only (docs/verified_on.md). All are memory-bound: each reads and writes every byte once, 16 at a
// time. Rows of logits, which are too long for registers, are read again for their gradient while the L2 cache has them.
//
// Where a thread has several packs, a loop of its own reads them all before the first is used: so they are on their way at once
// (docs/gpu_performance.md, "asks for at once").

#include "cuda_plugin/ops_kernels.h"

#include <cassert>
#include <cfloat>
#include <cmath>

#include <algorithm>

#include "cuda_plugin/launch.h"
#include "cuda_plugin/pack.h"

namespace titan::ops::cuda {

namespace {

using namespace titan::cuda;

constexpr int kThreads = 256;
constexpr int kMaxThreads = 1024;
constexpr int64_t kMaxGrid = 0x7fffffff;

// ---- sums of a thread block, the same in all its threads and in all runs

template <class Combine>
__device__ float over_warp(float value, Combine combine) {
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2)
    value = combine(value, __shfl_xor_sync(kAllLanes, value, lanes));
  return value;
}

template <class Combine>
__device__ float over_block(float value, Combine combine) {
  __shared__ float of_warps[kMaxThreads / kWarp];
  value = over_warp(value, combine);
  __syncthreads();  // all have read the values of the call before
  if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = value;
  __syncthreads();
  value = of_warps[0];
  for (unsigned warp = 1; warp < blockDim.x / kWarp; ++warp) value = combine(value, of_warps[warp]);
  return value;
}

__device__ float sum_of_block(float value) {
  return over_block(value, [](float a, float b) { return a + b; });
}
__device__ float largest_of_block(float value) {
  return over_block(value, [](float a, float b) { return fmaxf(a, b); });
}

// ---- exponentials

// For results of type T. In bf16 by a device's own instruction, which takes two in place of eight. Its relative error is about 2^-22 + |x| 2^-24, and
// bf16 rounds to 2^-9. Below 2^-126 it gives 0.
template <class T>
__device__ float exp_for(float x) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(T) < sizeof(float)) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x * 1.44269504f));  // x / log(2)
    return result;
  }
#endif
  return expf(x);
}

template <class T>
__device__ float sigmoid(float x) {
#ifdef __CUDA_ARCH__
  // 0 where the divisor is above 2^126.
  if constexpr (sizeof(T) < sizeof(float)) return __fdividef(1, 1 + exp_for<T>(-x));
#endif
  return 1 / (1 + exp_for<T>(-x));
}

// ---- RMS norm

// Packs of a row in one thread. The backward holds two tensors and the sums, for which 1,024 threads have too few registers.
constexpr int kPacks = 2, kBackwardPacks = 4, kMaxBackwardThreads = 512;
static_assert(kMaxNormBytes == kMaxThreads * kPacks * sizeof(Pack<float>));
static_assert(kMaxNormBytes == kMaxBackwardThreads * kBackwardPacks * sizeof(Pack<float>));

// Norms x, or if `added` isn't null, x + added, which is rounded and written to `sum`.
template <class T>
__device__ void norm_rows(T* y, float* rstd, T* sum, const T* x, const T* added, const T* weight,
                          int64_t rows, int size, float eps) {
  const int packs = size / Pack<T>::kSize;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    PackBits bits[kPacks], others[kPacks];
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      const int i = threadIdx.x + k * blockDim.x;
      if (i >= packs) continue;
      bits[k] = reinterpret_cast<const PackBits*>(x)[row * packs + i];
      if (added) others[k] = reinterpret_cast<const PackBits*>(added)[row * packs + i];
    }
    Pack<T> held[kPacks];
    float squares = 0;
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      const int i = threadIdx.x + k * blockDim.x;
      if (i >= packs) continue;
      held[k] = unpacked<T>(bits[k]);
      if (added) {
        const Pack<T> other = unpacked<T>(others[k]);
        for (int e = 0; e < Pack<T>::kSize; ++e)
          held[k].values[e] = narrow<T>(widen(held[k].values[e]) + widen(other.values[e]));
        reinterpret_cast<Pack<T>*>(sum)[row * packs + i] = held[k];
      }
      for (const T value : held[k].values) squares += widen(value) * widen(value);
    }
    const float scale = 1 / sqrtf(sum_of_block(squares) / static_cast<float>(size) + eps);
    if (threadIdx.x == 0) rstd[row] = scale;
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      const int i = threadIdx.x + k * blockDim.x;
      if (i >= packs) continue;
      const Pack<T> factors = reinterpret_cast<const Pack<T>*>(weight)[i];
      Pack<T> out;
      for (int e = 0; e < Pack<T>::kSize; ++e)
        out.values[e] = narrow<T>(widen(held[k].values[e]) * scale * widen(factors.values[e]));
      reinterpret_cast<Pack<T>*>(y)[row * packs + i] = out;
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kMaxThreads)
    rms_norm_kernel(T* y, float* rstd, const T* x, const T* weight, int64_t rows, int size, float eps) {
  norm_rows<T>(y, rstd, nullptr, x, nullptr, weight, rows, size, eps);
}

template <class T>
__global__ void __launch_bounds__(kMaxThreads)
    add_rms_norm_kernel(T* y, float* rstd, T* sum, const T* x, const T* added, const T* weight, int64_t rows,
                        int size, float eps) {
  norm_rows(y, rstd, sum, x, added, weight, rows, size, eps);
}

// With n = x * rstd and h = grad * weight: grad_x = added + rstd * (h - n * mean(h * n)). Each block sums grad * n, the weight's gradient,
// over its rows, in registers.
template <class T>
__global__ void __launch_bounds__(kMaxBackwardThreads)
    rms_norm_backward_kernel(T* grad_x, float* parts, const T* grad, const T* added, const T* x,
                             const T* weight, const float* rstd, int64_t rows, int size) {
  constexpr int kSize = Pack<T>::kSize;
  const int packs = size / kSize;
  float sums[kBackwardPacks * kSize] = {};
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const float scale = rstd[row];
    PackBits g_bits[kBackwardPacks], n_bits[kBackwardPacks];
#pragma unroll
    for (int k = 0; k < kBackwardPacks; ++k) {
      const int i = threadIdx.x + k * blockDim.x;
      if (i >= packs) continue;
      g_bits[k] = reinterpret_cast<const PackBits*>(grad)[row * packs + i];
      n_bits[k] = reinterpret_cast<const PackBits*>(x)[row * packs + i];
    }
    float dot = 0;
#pragma unroll
    for (int k = 0; k < kBackwardPacks; ++k) {
      const int i = threadIdx.x + k * blockDim.x;
      if (i >= packs) continue;
      const Pack<T> g = unpacked<T>(g_bits[k]), n = unpacked<T>(n_bits[k]),
                    factors = reinterpret_cast<const Pack<T>*>(weight)[i];
      for (int e = 0; e < kSize; ++e) {
        const float product = widen(g.values[e]) * (widen(n.values[e]) * scale);
        sums[k * kSize + e] += product;
        dot += product * widen(factors.values[e]);
      }
    }
    const float mean = sum_of_block(dot) / static_cast<float>(size);
    PackBits others[kBackwardPacks] = {};
#pragma unroll
    for (int k = 0; k < kBackwardPacks; ++k) {
      const int i = threadIdx.x + k * blockDim.x;
      if (added && i < packs) others[k] = reinterpret_cast<const PackBits*>(added)[row * packs + i];
    }
#pragma unroll
    for (int k = 0; k < kBackwardPacks; ++k) {
      const int i = threadIdx.x + k * blockDim.x;
      if (i >= packs) continue;
      const Pack<T> g = unpacked<T>(g_bits[k]), n = unpacked<T>(n_bits[k]), other = unpacked<T>(others[k]),
                    factors = reinterpret_cast<const Pack<T>*>(weight)[i];
      Pack<T> out;
      for (int e = 0; e < kSize; ++e) {
        const float h = widen(g.values[e]) * widen(factors.values[e]);
        const float by_norm = (h - widen(n.values[e]) * scale * mean) * scale;
        out.values[e] = narrow<T>(added ? widen(other.values[e]) + by_norm : by_norm);
      }
      reinterpret_cast<Pack<T>*>(grad_x)[row * packs + i] = out;
    }
  }
#pragma unroll
  for (int k = 0; k < kBackwardPacks; ++k) {
    const int i = threadIdx.x + k * blockDim.x;
    if (i >= packs) continue;
    for (int e = 0; e < kSize; e += Pack<float>::kSize) {
      Pack<float> out;
      for (int j = 0; j < Pack<float>::kSize; ++j) out.values[j] = sums[k * kSize + e + j];
      reinterpret_cast<Pack<float>*>(
          parts)[(int64_t{blockIdx.x} * size + i * kSize + e) / Pack<float>::kSize] = out;
    }
  }
}

// In a thread block. There are few blocks, one for 32 features, so each needs many reads on their way.
constexpr int kSumColumns = 32, kSumRows = 32;
__global__ void sum_of_rows_kernel(float* out, const float* x, int64_t rows, int64_t columns) {
  __shared__ float sums[kSumRows][kSumColumns];
  const int64_t column = int64_t{blockIdx.x} * kSumColumns + threadIdx.x;
  float sum = 0;
  if (column < columns)
    for (int64_t row = threadIdx.y; row < rows; row += kSumRows) sum += x[row * columns + column];
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= columns) return;
  for (int i = 1; i < kSumRows; ++i) sum += sums[i][threadIdx.x];
  out[column] = sum;
}

// ---- rotary positions

// A thread has one pack of a head's features, reads their angles once, and turns the pack of every head.
template <class T>
__global__ void rotary_kernel(Rotation in) {
  constexpr int kSize = Pack<T>::kSize;
  const int lanes = in.size / kSize, lane = threadIdx.x % lanes;
  for (int64_t token = blockIdx.x; token < in.tokens; token += gridDim.x) {
    const int64_t place = token % in.num_positions;
    const int64_t position = in.positions ? in.positions[place] : place;
    assert(position >= 0 && position < in.table_rows);
    float cos_sin[kSize];
#pragma unroll
    for (int e = 0; e < kSize; e += Pack<float>::kSize) {
      const Pack<float> angles = reinterpret_cast<const Pack<float>*>(
          in.table)[(position * in.size + lane * kSize + e) / Pack<float>::kSize];
#pragma unroll
      for (int j = 0; j < Pack<float>::kSize; j += 2) {
        cos_sin[e + j] = angles.values[j];
        cos_sin[e + j + 1] = in.inverse ? -angles.values[j + 1] : angles.values[j + 1];
      }
    }
    for (int64_t each = threadIdx.x / lanes; each < in.first.heads + in.second.heads;
         each += blockDim.x / lanes) {
      const bool is_second = each >= in.first.heads;
      const int64_t heads = is_second ? in.second.heads : in.first.heads;
      const int64_t i = (token * heads + (is_second ? each - in.first.heads : each)) * lanes + lane;
      Pack<T> pack = static_cast<const Pack<T>*>(is_second ? in.second.x : in.first.x)[i];
#pragma unroll
      for (int e = 0; e < kSize; e += 2) {
        const float even = widen(pack.values[e]), odd = widen(pack.values[e + 1]);
        const float c = cos_sin[e], s = cos_sin[e + 1];
        pack.values[e] = narrow<T>(even * c - odd * s);
        pack.values[e + 1] = narrow<T>(even * s + odd * c);
      }
      static_cast<Pack<T>*>(is_second ? in.second.out : in.first.out)[i] = pack;
    }
  }
}

// ---- SwiGLU

template <class T>
__global__ void swiglu_kernel(T* out, const T* gate, const T* up, int64_t packs) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < packs;
       i += int64_t{gridDim.x} * kThreads) {
    const Pack<T> a = reinterpret_cast<const Pack<T>*>(gate)[i], b = reinterpret_cast<const Pack<T>*>(up)[i];
    Pack<T> y;
    for (int e = 0; e < Pack<T>::kSize; ++e) {
      const float x = widen(a.values[e]);
      y.values[e] = narrow<T>(x * sigmoid<T>(x) * widen(b.values[e]));
    }
    reinterpret_cast<Pack<T>*>(out)[i] = y;
  }
}

template <class T>
__global__ void swiglu_backward_kernel(T* grad_gate, T* grad_up, T* out, const T* grad, const T* gate,
                                       const T* up, int64_t packs) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < packs;
       i += int64_t{gridDim.x} * kThreads) {
    const Pack<T> g = reinterpret_cast<const Pack<T>*>(grad)[i],
                  a = reinterpret_cast<const Pack<T>*>(gate)[i], b = reinterpret_cast<const Pack<T>*>(up)[i];
    Pack<T> by_gate, by_up, y_again;
    for (int e = 0; e < Pack<T>::kSize; ++e) {
      const float x = widen(a.values[e]), y = widen(g.values[e]), s = sigmoid<T>(x);
      by_gate.values[e] = narrow<T>(y * widen(b.values[e]) * s * (1 + x * (1 - s)));
      by_up.values[e] = narrow<T>(y * x * s);
      y_again.values[e] = narrow<T>(x * s * widen(b.values[e]));
    }
    reinterpret_cast<Pack<T>*>(grad_gate)[i] = by_gate;
    reinterpret_cast<Pack<T>*>(grad_up)[i] = by_up;
    if (out) reinterpret_cast<Pack<T>*>(out)[i] = y_again;
  }
}

// ---- attention in parts

__device__ int64_t place_of(const AttentionPart::Strides& strides, int64_t batch, int64_t token,
                            int64_t head) {
  return batch * strides.batch + token * strides.token + head * strides.head;
}

// A row is one query's head, and a thread has one pack of the part's features.
template <class T>
__global__ void merge_attention_kernel(AttentionPart in) {
  constexpr int kSize = Pack<T>::kSize, kWideSize = Pack<float>::kSize;
  const int lanes = in.size / kSize, lane = threadIdx.x % lanes;
  const int64_t rows = in.batch * in.tokens * in.heads, rows_of_block = blockDim.x / lanes;
  for (int64_t first = blockIdx.x * rows_of_block; first < rows; first += gridDim.x * rows_of_block) {
    const int64_t row = first + threadIdx.x / lanes;
    const int64_t head = row % in.heads, token = row / in.heads % in.tokens,
                  batch = row / in.heads / in.tokens;
    float* sum = in.log_sum_exp + place_of(in.of_sums, batch, token, head);
    float old_sum = 0, part_sum = 0;
    if (row < rows) {
      old_sum = *sum;
      part_sum = in.part_log_sum_exp[place_of(in.of_part_sums, batch, token, head)];
    }
    __syncthreads();  // all threads of a row have read its sum
    if (row >= rows) continue;
    if (lane == 0) *sum = fmaxf(old_sum, part_sum) + log1pf(expf(-fabsf(old_sum - part_sum)));
    const float share = sigmoid<float>(part_sum - old_sum);  // 1 if there were no keys before (-inf)
    const Pack<T> part =
        static_cast<const Pack<T>*>(in.part)[place_of(in.of_part, batch, token, head) / kSize + lane];
    auto* out =
        reinterpret_cast<Pack<float>*>(in.out + place_of(in.of_out, batch, token, head) + lane * kSize);
#pragma unroll
    for (int e = 0; e < kSize; e += kWideSize) {
      Pack<float> values = out[e / kWideSize];
#pragma unroll
      for (int j = 0; j < kWideSize; ++j) {
        const float old = values.values[j], other = widen(part.values[e + j]);
        values.values[j] = share < 0.5f ? old + share * (other - old) : other - (other - old) * (1 - share);
      }
      out[e / kWideSize] = values;
    }
  }
}

// ---- sums of ranks' summands

// Eight parts are on their way at once.
template <class T>
__global__ void sum_of_parts_kernel(SumOfParts in) {
  constexpr int kSize = Pack<T>::kSize, kAtOnce = 8;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < in.size / kSize;
       i += int64_t{gridDim.x} * kThreads) {
    float sums[kSize] = {};
    for (int first = 0; first < in.num_parts; first += kAtOnce) {
      Pack<T> parts[kAtOnce];
#pragma unroll
      for (int p = 0; p < kAtOnce; ++p)
        if (first + p < in.num_parts) parts[p] = static_cast<const Pack<T>*>(in.parts[first + p])[i];
#pragma unroll
      for (int p = 0; p < kAtOnce; ++p) {
        if (first + p >= in.num_parts) continue;
#pragma unroll
        for (int e = 0; e < kSize; ++e)
          sums[e] = first + p == 0 ? widen(parts[p].values[e]) : sums[e] + widen(parts[p].values[e]);
      }
    }
    Pack<T> sum;
#pragma unroll
    for (int e = 0; e < kSize; ++e) sum.values[e] = narrow<T>(sums[e]);
    static_cast<Pack<T>*>(in.out)[i] = sum;
  }
}

// ---- the loss: a thread block per row of logits

constexpr int kMaxRowThreads = kMaxThreads;

// Packs of a row that a thread reads at once.
constexpr int kPacksAtOnce = 4;

// Calls use(pack, its index) for each of this thread's packs of a row, in order.
template <class T, class Use>
__device__ void for_packs_of_row(const T* row, int64_t columns, const Use& use) {
  const int64_t packs = columns / Pack<T>::kSize;
  for (int64_t first = threadIdx.x; first < packs; first += kPacksAtOnce * int64_t{blockDim.x}) {
    PackBits bits[kPacksAtOnce];
#pragma unroll
    for (int k = 0; k < kPacksAtOnce; ++k) {
      const int64_t i = first + k * int64_t{blockDim.x};
      if (i < packs) bits[k] = reinterpret_cast<const PackBits*>(row)[i];
    }
#pragma unroll
    for (int k = 0; k < kPacksAtOnce; ++k) {
      const int64_t i = first + k * int64_t{blockDim.x};
      if (i < packs) use(unpacked<T>(bits[k]), i);
    }
  }
}

// log(sum(exp(x))) in one pass: a thread's sum is relative to the largest value that it has seen.
template <class T>
__device__ double log_sum_exp_of_row(const T* row, int64_t columns) {
  float top = -FLT_MAX, sum = 0;
  for_packs_of_row(row, columns, [&](const Pack<T>& pack, int64_t /*i*/) {
    float largest = top;
    for (const T value : pack.values) largest = fmaxf(largest, widen(value));
    if (largest > top) sum *= exp_for<T>(top - largest);
    top = largest;
    for (const T value : pack.values) sum += exp_for<T>(widen(value) - top);
  });
  const float top_of_row = largest_of_block(top);
  const float total = sum_of_block(sum * exp_for<T>(top - top_of_row));
  // By one thread, because some GPUs have few units for fp64. The next row's barriers come before it is written again.
  __shared__ double log_sum;
  if (threadIdx.x == 0) log_sum = double{top_of_row} + log(double{total});
  __syncthreads();
  return log_sum;
}

struct RowFactors {
  float by_softmax = 1, by_target = -1, by_any = 0;
};

/// target: the label's column, or a negative number if another part has it.
template <class T>
__device__ void write_gradient_of_row(T* row, int64_t columns, int64_t target, double log_sum,
                                      RowFactors factors) {
  constexpr int kSize = Pack<T>::kSize;
  const auto shift = static_cast<float>(log_sum);
  const float by_any = factors.by_any + 0.0f;  // never -0, and so no sum is
  const auto by_others = [&](float logit) { return exp_for<T>(logit - shift) * factors.by_softmax + by_any; };
  // The thread that has the label's pack writes its element again, so that no element is compared with the label.
  const bool has_target = target >= 0 && target / kSize % blockDim.x == threadIdx.x;
  const float target_logit = has_target ? widen(row[target]) : 0;
  for_packs_of_row(row, columns, [&](const Pack<T>& pack, int64_t i) {
    Pack<T> out;
    for (int e = 0; e < kSize; ++e) out.values[e] = narrow<T>(by_others(widen(pack.values[e])));
    reinterpret_cast<Pack<T>*>(row)[i] = out;
  });
  if (has_target) row[target] = narrow<T>(by_others(target_logit) + factors.by_target);
}

template <class T>
__device__ void write_zeros_to_row(T* row, int64_t columns) {
  Pack<T> zeros;
  for (T& value : zeros.values) value = narrow<T>(0);
  for (int64_t i = threadIdx.x; i < columns / Pack<T>::kSize; i += blockDim.x)
    reinterpret_cast<Pack<T>*>(row)[i] = zeros;
}

/// The column of a row's label; -1 if another part has it.
__device__ int64_t target_of(const LogitRows& in, int64_t row) {
  const int64_t column = in.labels[row] - in.first;
  return column >= 0 && column < in.columns ? column : -1;
}

template <class T>
__global__ void __launch_bounds__(kMaxRowThreads)
    cross_entropy_kernel(double* losses, LogitRows in, bool with_grad) {
  for (int64_t row = blockIdx.x; row < in.rows; row += gridDim.x) {
    T* logits = static_cast<T*>(in.logits) + row * in.columns;
    if (in.labels[row] == in.ignored_label) {
      if (threadIdx.x == 0) losses[row] = 0;
      if (with_grad) write_zeros_to_row(logits, in.columns);
      continue;
    }
    const int64_t target = target_of(in, row);
    assert(target >= 0);
    const double target_logit = widen(logits[target]);
    const double log_sum = log_sum_exp_of_row(logits, in.columns);  // its barriers come before the writes
    if (threadIdx.x == 0) losses[row] = log_sum - target_logit;
    if (with_grad) write_gradient_of_row(logits, in.columns, target, log_sum, {});
  }
}

template <class T>
__global__ void __launch_bounds__(kMaxRowThreads)
    vocabulary_stats_kernel(double* log_sums, double* targets, LogitRows in) {
  for (int64_t row = blockIdx.x; row < in.rows; row += gridDim.x) {
    const T* logits = static_cast<const T*>(in.logits) + row * in.columns;
    const double log_sum = log_sum_exp_of_row(logits, in.columns);
    if (threadIdx.x != 0) continue;
    const int64_t target = target_of(in, row);
    log_sums[row] = log_sum;
    targets[row] = target >= 0 ? double{widen(logits[target])} : 0;
  }
}

template <class T>
__global__ void __launch_bounds__(kMaxRowThreads)
    vocabulary_grad_kernel(LogitRows in, const double* log_sums, GradientFactors factors) {
  for (int64_t row = blockIdx.x; row < in.rows; row += gridDim.x) {
    T* logits = static_cast<T*>(in.logits) + row * in.columns;
    if (in.labels[row] == in.ignored_label) {
      write_zeros_to_row(logits, in.columns);
      continue;
    }
    RowFactors mine;
    if (factors.by_softmax)
      mine = {static_cast<float>(factors.by_softmax[row]), static_cast<float>(factors.by_target[row]),
              static_cast<float>(factors.by_any[row])};
    write_gradient_of_row(logits, in.columns, target_of(in, row), log_sums[row], mine);
  }
}

// ---- sizes of launches

dim3 grid_of(int64_t blocks) { return dim3(static_cast<unsigned>(std::clamp<int64_t>(blocks, 1, kMaxGrid))); }

// Whole warps, because sums of a block take whole ones.
dim3 threads_for_row(int64_t packs, int packs_per_thread) {
  return dim3(static_cast<unsigned>(parts_of(packs, int64_t{packs_per_thread} * kWarp) * kWarp));
}

// So many that each thread reads all of its packs of a row at once, or in several rounds where that would take more than fit a block.
dim3 threads_for_logits(int64_t packs) {
  return dim3(static_cast<unsigned>(
      std::min<int64_t>(parts_of(packs, int64_t{kPacksAtOnce} * kWarp) * kWarp, kMaxRowThreads)));
}

}  // namespace

void launch_rms_norm(void* y, float* rstd, const NormRows& in, float eps, cudaStream_t stream) {
  with_source(in.source, [&]<class T>(T) {
    launch_kernel(rms_norm_kernel<T>, grid_of(in.rows), threads_for_row(in.size / Pack<T>::kSize, kPacks),
                  stream, static_cast<T*>(y), rstd, static_cast<const T*>(in.x),
                  static_cast<const T*>(in.weight), in.rows, static_cast<int>(in.size), eps);
  });
}

void launch_add_rms_norm(void* y, float* rstd, void* sum, const void* added, const NormRows& in, float eps,
                         cudaStream_t stream) {
  with_source(in.source, [&]<class T>(T) {
    launch_kernel(add_rms_norm_kernel<T>, grid_of(in.rows), threads_for_row(in.size / Pack<T>::kSize, kPacks),
                  stream, static_cast<T*>(y), rstd, static_cast<T*>(sum), static_cast<const T*>(in.x),
                  static_cast<const T*>(added), static_cast<const T*>(in.weight), in.rows,
                  static_cast<int>(in.size), eps);
  });
}

void launch_rms_norm_backward(const NormGradients& out, const void* grad, const void* added,
                              const NormRows& in, const float* rstd, cudaStream_t stream) {
  with_source(in.source, [&]<class T>(T) {
    launch_kernel(rms_norm_backward_kernel<T>, grid_of(out.num_parts),
                  threads_for_row(in.size / Pack<T>::kSize, kBackwardPacks), stream,
                  static_cast<T*>(out.grad_x), out.parts, static_cast<const T*>(grad),
                  static_cast<const T*>(added), static_cast<const T*>(in.x), static_cast<const T*>(in.weight),
                  rstd, in.rows, static_cast<int>(in.size));
  });
  launch_kernel(sum_of_rows_kernel, grid_of(parts_of(in.size, kSumColumns)), dim3(kSumColumns, kSumRows),
                stream, out.grad_weight, out.parts, out.num_parts, in.size);
}

void launch_rotary(const Rotation& in, cudaStream_t stream) {
  with_source(in.source, [&]<class T>(T) {
    const int64_t lanes = in.size / Pack<T>::kSize;
    launch_kernel(rotary_kernel<T>, grid_of(in.tokens), dim3(static_cast<unsigned>(kThreads / lanes * lanes)),
                  stream, in);
  });
}

// So many packs that each thread has a few.
constexpr int64_t kPacksPerBlock = kThreads * 4;

void launch_swiglu(void* out, const GateAndUp& in, cudaStream_t stream) {
  with_source(in.source, [&]<class T>(T) {
    const int64_t packs = in.count / Pack<T>::kSize;
    launch_kernel(swiglu_kernel<T>, grid_of(parts_of(packs, kPacksPerBlock)), dim3(kThreads), stream,
                  static_cast<T*>(out), static_cast<const T*>(in.gate), static_cast<const T*>(in.up), packs);
  });
}

void launch_swiglu_backward(const SwigluGradients& to, const void* grad, const GateAndUp& in,
                            cudaStream_t stream) {
  with_source(in.source, [&]<class T>(T) {
    const int64_t packs = in.count / Pack<T>::kSize;
    launch_kernel(swiglu_backward_kernel<T>, grid_of(parts_of(packs, kPacksPerBlock)), dim3(kThreads), stream,
                  static_cast<T*>(to.grad_gate), static_cast<T*>(to.grad_up), static_cast<T*>(to.out),
                  static_cast<const T*>(grad), static_cast<const T*>(in.gate), static_cast<const T*>(in.up),
                  packs);
  });
}

void launch_merge_attention(const AttentionPart& in, cudaStream_t stream) {
  with_source(in.source, [&]<class T>(T) {
    const int64_t lanes = in.size / Pack<T>::kSize, rows_of_block = kThreads / lanes;
    launch_kernel(merge_attention_kernel<T>,
                  grid_of(parts_of(in.batch * in.tokens * in.heads, rows_of_block)),
                  dim3(static_cast<unsigned>(rows_of_block * lanes)), stream, in);
  });
}

void launch_sum_of_parts(const SumOfParts& in, cudaStream_t stream) {
  with_source(in.source, [&]<class T>(T) {
    launch_kernel(sum_of_parts_kernel<T>, grid_of(parts_of(in.size / Pack<T>::kSize, kThreads)),
                  dim3(kThreads), stream, in);
  });
}

void launch_cross_entropy(double* losses, const LogitRows& in, bool with_grad, cudaStream_t stream) {
  with_source(in.source, [&]<class T>(T) {
    launch_kernel(cross_entropy_kernel<T>, grid_of(in.rows), threads_for_logits(in.columns / Pack<T>::kSize),
                  stream, losses, in, with_grad);
  });
}

void launch_vocabulary_stats(double* log_sums, double* targets, const LogitRows& in, cudaStream_t stream) {
  with_source(in.source, [&]<class T>(T) {
    launch_kernel(vocabulary_stats_kernel<T>, grid_of(in.rows),
                  threads_for_logits(in.columns / Pack<T>::kSize), stream, log_sums, targets, in);
  });
}

void launch_vocabulary_grad(const LogitRows& in, const double* log_sums, const GradientFactors& factors,
                            cudaStream_t stream) {
  with_source(in.source, [&]<class T>(T) {
    launch_kernel(vocabulary_grad_kernel<T>, grid_of(in.rows),
                  threads_for_logits(in.columns / Pack<T>::kSize), stream, in, log_sums, factors);
  });
}

}  // namespace titan::ops::cuda
