// So far this has run on virtual GPUs only (docs/verified_on.md). Each byte is read once and written once.

#include "cuda_plugin/adam_kernels.h"

#include "cuda_plugin/launch.h"

namespace titan::ops::cuda {

namespace {

using adam::Bf16;

constexpr int kThreads = 256, kPerThread = 4;
// A thread block's elements: enough that their time hides that of the powers in factors_of().
constexpr int64_t kElements = kThreads * kPerThread * 16;

template <class T>
struct alignas(kPerThread * sizeof(T)) Quad {
  T values[kPerThread];
};

template <class T>
__device__ Quad<T> load(const T* from, int count, bool aligned) {
  if (aligned && count == kPerThread) return *reinterpret_cast<const Quad<T>*>(from);
  Quad<T> quad;
#pragma unroll
  for (int e = 0; e < kPerThread; ++e) quad.values[e] = e < count ? from[e] : T{};
  return quad;
}
template <class T>
__device__ void store(T* to, const Quad<T>& quad, int count, bool aligned) {
  if (aligned && count == kPerThread) {
    *reinterpret_cast<Quad<T>*>(to) = quad;
    return;
  }
#pragma unroll
  for (int e = 0; e < kPerThread; ++e)
    if (e < count) to[e] = quad.values[e];
}

template <class P, class S>
__device__ bool is_aligned(const AdamTensors::Tensor& x) {
  const auto begins_at = [](const void* data, size_t bytes) {
    return reinterpret_cast<uintptr_t>(data) % bytes == 0;
  };
  return begins_at(x.param, sizeof(Quad<P>)) && begins_at(x.grad, sizeof(Quad<P>)) &&
         begins_at(x.exp_avg, sizeof(Quad<S>)) && begins_at(x.exp_avg_sq, sizeof(Quad<S>));
}

// Goes through the indices in the whole parameter of local elements.
struct Index {
  uint64_t value, column;

  // offset: of the element after a block's first one, which is in this column of its row.
  __device__ Index(const adam::Place& place, uint64_t of_row, uint64_t column_of_first, int offset) {
    const auto row = static_cast<uint64_t>(place.row);
    column = column_of_first + offset;
    uint64_t rows = 0;
    // From the third row on, rows are shorter than a block, and numbers have 32 bits.
    if (column >= row)
      rows = column - row < row ? 1 : static_cast<uint32_t>(column) / static_cast<uint32_t>(row);
    column -= rows * row;
    value = of_row + rows * static_cast<uint64_t>(place.pitch) + column;
  }
  __device__ void advance(const adam::Place& place) {
    ++value;
    if (++column < static_cast<uint64_t>(place.row)) return;
    column = 0;
    value += static_cast<uint64_t>(place.pitch - place.row);
  }
};

/// The words of this element and the next one, as those of a pair. Moves the index to the element after them.
__device__ adam::RandomWords words_of_two(const adam::Place& place, Index& index, uint32_t step) {
  const uint64_t pair = index.value >> 1;
  adam::RandomWords words = adam::random_words(place.key, pair, step);
  const bool first_is_odd = index.value & 1;
  index.advance(place);
  if (!first_is_odd && index.value >> 1 == pair) {
    index.advance(place);
    return words;
  }
  if (first_is_odd) {
    words.words[0] = words.words[2];
    words.words[1] = words.words[3];
  }
  const adam::RandomWords next = adam::random_words(place.key, index.value >> 1, step);
  words.words[2] = index.value & 1 ? next.words[2] : next.words[0];
  words.words[3] = index.value & 1 ? next.words[3] : next.words[1];
  index.advance(place);
  return words;
}

template <class P, class S, bool kStochastic>
__global__ void __launch_bounds__(kThreads, kStochastic ? 3 : 4)
    adam_kernel(AdamTensors in, adam::Rule rule, const double* grad_factor, const float* skip,
                const float* lr) {
  if (skip && *skip == 1) return;
  int which = 0;
  while (which + 1 < in.num_tensors && in.first_block[which + 1] <= static_cast<int>(blockIdx.x)) ++which;
  const AdamTensors::Tensor& x = in.tensors[which];
  const int64_t begin = (static_cast<int64_t>(blockIdx.x) - in.first_block[which]) * kElements;
  const int count = static_cast<int>(x.count - begin < kElements ? x.count - begin : kElements);

  __shared__ adam::Factors factors;
  __shared__ uint64_t of_row, column_of_first;
  if (threadIdx.x == 0) {
    if (lr) rule.lr = *lr;
    factors = adam::factors_of(rule, *x.step, grad_factor ? *grad_factor : 1);
    const int64_t row = begin / x.place.row;
    of_row = static_cast<uint64_t>(x.place.first + row * x.place.pitch);
    column_of_first = static_cast<uint64_t>(begin - row * x.place.row);
  }
  __syncthreads();

  P* const params = static_cast<P*>(x.param) + begin;
  const P* const grads = static_cast<const P*>(x.grad) + begin;
  S* const exp_avgs = static_cast<S*>(x.exp_avg) + begin;
  S* const exp_avg_sqs = static_cast<S*>(x.exp_avg_sq) + begin;
  const bool aligned = is_aligned<P, S>(x);
  for (int i = threadIdx.x * kPerThread; i < count; i += kThreads * kPerThread) {
    const int left = count - i < kPerThread ? count - i : kPerThread;
    Quad<P> param = load(params + i, left, aligned);
    const Quad<P> grad = load(grads + i, left, aligned);
    Quad<S> exp_avg = load(exp_avgs + i, left, aligned), exp_avg_sq = load(exp_avg_sqs + i, left, aligned);
    [[maybe_unused]] Index index(x.place, of_row, column_of_first, i);
#pragma unroll
    for (int two = 0; two < kPerThread; two += 2) {
      adam::RandomWords random{};
      if constexpr (kStochastic) random = words_of_two(x.place, index, factors.step);
#pragma unroll
      for (int e = two; e < two + 2; ++e) {
        const adam::Element updated =
            adam::updated({adam::widened(param.values[e]), adam::widened(exp_avg.values[e]),
                           adam::widened(exp_avg_sq.values[e])},
                          adam::widened(grad.values[e]), factors);
        const uint32_t of_states = random.words[2 * (e - two)], of_param = random.words[2 * (e - two) + 1];
        param.values[e] = adam::rounded<P>(updated.param, of_param, kStochastic);
        exp_avg.values[e] = adam::rounded<S>(updated.exp_avg, of_states, kStochastic);
        exp_avg_sq.values[e] = adam::rounded<S>(updated.exp_avg_sq, of_states >> 16, kStochastic);
      }
    }
    store(params + i, param, left, aligned);
    store(exp_avgs + i, exp_avg, left, aligned);
    store(exp_avg_sqs + i, exp_avg_sq, left, aligned);
  }
}

// Calls launch(T{}) with the type of the elements.
template <class Launch>
void with_element(titan::cuda::Source source, Launch launch) {
  if (source == titan::cuda::Source::Float)
    launch(float{});
  else
    launch(Bf16{});
}

}  // namespace

void launch_adam(AdamTensors in, AdamSources sources, const adam::Rule& rule, const double* grad_factor,
                 const float* skip, const float* lr, cudaStream_t stream) {
  int64_t blocks = 0;
  for (int i = 0; i < in.num_tensors; ++i) {
    in.first_block[i] = static_cast<int>(blocks);
    blocks += (in.tensors[i].count + kElements - 1) / kElements;
  }
  const dim3 grid(static_cast<unsigned>(blocks));
  with_element(sources.param, [&]<class P>(P) {
    with_element(sources.state, [&]<class S>(S) {
      if (rule.stochastic)
        launch_kernel(adam_kernel<P, S, true>, grid, dim3(kThreads), stream, in, rule, grad_factor, skip, lr);
      else
        launch_kernel(adam_kernel<P, S, false>, grid, dim3(kThreads), stream, in, rule, grad_factor, skip,
                      lr);
    });
  });
}

}  // namespace titan::ops::cuda
