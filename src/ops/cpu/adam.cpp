// titan::adam_ on a CPU.

#include <algorithm>

#include <torch/library.h>

#include <ATen/Parallel.h>

#include "ops/adam_formula.h"
#include "ops/cpu/simd.h"
#include "ops/operators.h"
#include "titan/core/error.h"

namespace titan::ops {

namespace {

using adam::Bf16;

constexpr int64_t kBlock = 256, kPairs = kBlock / 2 + 1;

// The words of random_words() for `count` pairs of elements from `first` on, in arrays, which the compiler makes vectors of.
struct Words {
  uint32_t c0[kPairs], c1[kPairs], c2[kPairs], c3[kPairs];
};

TITAN_INLINE void draw_words(Words& w, int64_t count, uint64_t key, uint64_t first, uint32_t step) {
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t pair = first + static_cast<uint64_t>(i);
    w.c0[i] = static_cast<uint32_t>(pair);
    w.c1[i] = static_cast<uint32_t>(pair >> 32);
    w.c2[i] = step;
    w.c3[i] = 0;
  }
  auto key0 = static_cast<uint32_t>(key), key1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round, key0 += kPhiloxWeyl0, key1 += kPhiloxWeyl1) {
    for (int64_t i = 0; i < count; ++i) {
      const uint64_t product0 = uint64_t{kPhiloxMul0} * w.c0[i], product1 = uint64_t{kPhiloxMul1} * w.c2[i];
      w.c0[i] = static_cast<uint32_t>(product1 >> 32) ^ w.c1[i] ^ key0;
      w.c1[i] = static_cast<uint32_t>(product1);
      w.c2[i] = static_cast<uint32_t>(product0 >> 32) ^ w.c3[i] ^ key1;
      w.c3[i] = static_cast<uint32_t>(product0);
    }
  }
}

// Random bits of elements that are adjacent in the whole parameter, of which `first` is the first one's index.
TITAN_INLINE void draw_random(uint32_t* of_states, uint32_t* of_params, int64_t count, uint64_t key,
                              uint64_t first, uint32_t step) {
  const auto odd = static_cast<int64_t>(first & 1);
  Words words;
  draw_words(words, (odd + count + 1) / 2, key, first >> 1, step);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t pair = (i + odd) >> 1;
    const bool second = ((i + odd) & 1) != 0;
    of_states[i] = second ? words.c2[pair] : words.c0[pair];
    of_params[i] = second ? words.c3[pair] : words.c1[pair];
  }
}

template <class P, class S>
struct Local {
  P* param;
  const P* grad;
  S *exp_avg, *exp_avg_sq;
};

template <class P, class S>
TITAN_CPU_CLONES void update_range(Local<P, S> x, int64_t begin, int64_t end, adam::Place place,
                                   adam::Factors factors, bool stochastic) {
  uint32_t of_states[kBlock] = {}, of_params[kBlock] = {};
  for (int64_t block = begin; block < end; block += kBlock) {
    const int64_t count = std::min(kBlock, end - block);
    for (int64_t i = 0; stochastic && i < count;) {
      const int64_t row = (block + i) / place.row, column = (block + i) % place.row,
                    adjacent = std::min(count - i, place.row - column);
      draw_random(of_states + i, of_params + i, adjacent, place.key,
                  static_cast<uint64_t>(place.first + row * place.pitch + column), factors.step);
      i += adjacent;
    }
    P* param = x.param + block;
    S *exp_avg = x.exp_avg + block, *exp_avg_sq = x.exp_avg_sq + block;
    for (int64_t i = 0; i < count; ++i) {
      const adam::Element updated =
          adam::updated({adam::widened(param[i]), adam::widened(exp_avg[i]), adam::widened(exp_avg_sq[i])},
                        adam::widened(x.grad[block + i]), factors);
      param[i] = adam::rounded<P>(updated.param, of_params[i], stochastic);
      exp_avg[i] = adam::rounded<S>(updated.exp_avg, of_states[i], stochastic);
      exp_avg_sq[i] = adam::rounded<S>(updated.exp_avg_sq, of_states[i] >> 16, stochastic);
    }
  }
}

// Calls kernel(T{}) with the type of the tensor's elements.
template <class Kernel>
void with_element(const at::Tensor& tensor, Kernel kernel) {
  if (tensor.scalar_type() == at::kFloat)
    kernel(float{});
  else
    kernel(Bf16{});
}

template <class T>
T* data_of(const at::Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

void adam_cpu(at::TensorList params, at::TensorList grads, at::TensorList exp_avgs,
              at::TensorList exp_avg_sqs, at::TensorList steps, at::IntArrayRef places, double lr,
              double beta1, double beta2, double weight_decay, double eps, bool decoupled, bool stochastic,
              const std::optional<at::Tensor>& grad_factor, const std::optional<at::Tensor>& skip,
              const std::optional<at::Tensor>& lr_on_device) {
  composite::check_adam(params, grads, exp_avgs, exp_avg_sqs, places);
  if (skip && skip->item<float>() == 1) return;
  const adam::Rule rule{lr_on_device ? lr_on_device->item<float>() : lr,
                        beta1,
                        beta2,
                        weight_decay,
                        eps,
                        decoupled,
                        stochastic};
  const double of_grad = grad_factor ? grad_factor->item<double>() : 1;
  for (size_t i = 0; i < params.size(); ++i) {
    const adam::Factors factors = adam::factors_of(rule, steps[i].item<float>(), of_grad);
    const adam::Place place = composite::adam_place(places, i);
    with_element(params[i], [&]<class P>(P) {
      with_element(exp_avgs[i], [&]<class S>(S) {
        const Local<P, S> local{data_of<P>(params[i]), static_cast<const P*>(grads[i].const_data_ptr()),
                                data_of<S>(exp_avgs[i]), data_of<S>(exp_avg_sqs[i])};
        at::parallel_for(0, params[i].numel(), /*grain_size=*/16384, [&](int64_t begin, int64_t end) {
          update_range(local, begin, end, place, factors, stochastic);
        });
      });
    });
  }
}

TORCH_LIBRARY_IMPL(titan, CPU, m) { m.impl("adam_", adam_cpu); }

}  // namespace
}  // namespace titan::ops
