#pragma once

// [Note: the arithmetic of titan::adam_]
// It updates parameters by Adam's formula ([Note: Adam] in src/optim/adam.cpp) and keeps states, or parameters, in bf16. One element is
// read, updated in fp32 and rounded here, on a CPU and in the kernel of a GPU alike, and with the same bits: products and sums aren't
// fused to one rounding (mul, add; CPU sources that include this are compiled with -ffp-contract=off), and powers are products.
//
// Stochastic rounding goes to the bf16 number above or below, each with the probability that makes the mean exact. Its 16 random bits are a
// function of the parameter's key (seed and name), its number of updates, and the element's row-major index in the whole parameter, so they
// don't depend on how ranks share the parameter: elements 2i and 2i+1 share a Philox block with counter (i, step), words 0 and 1 for the
// first, 2 and 3 for the second. The first word has the bits of both states, the other one those of the parameter.

#include <cstdint>

#include "ops/philox.h"

#ifdef __CUDACC__
#define TITAN_ANYWHERE __host__ __device__ __forceinline__
#else
#define TITAN_ANYWHERE __attribute__((always_inline)) inline
#endif

namespace titan::ops::adam {

/// An element of a bf16 tensor.
using Bf16 = uint16_t;

#ifdef __CUDA_ARCH__
#define TITAN_BY(of_gpu, of_cpu) of_gpu
#else
#define TITAN_BY(of_gpu, of_cpu) of_cpu
#endif
TITAN_ANYWHERE float mul(float a, float b) { return TITAN_BY(__fmul_rn(a, b), a * b); }
TITAN_ANYWHERE float add(float a, float b) { return TITAN_BY(__fadd_rn(a, b), a + b); }
TITAN_ANYWHERE float div(float a, float b) { return TITAN_BY(__fdiv_rn(a, b), a / b); }
TITAN_ANYWHERE float root(float a) { return TITAN_BY(__fsqrt_rn(a), __builtin_sqrtf(a)); }
TITAN_ANYWHERE double mul(double a, double b) { return TITAN_BY(__dmul_rn(a, b), a * b); }
TITAN_ANYWHERE double add(double a, double b) { return TITAN_BY(__dadd_rn(a, b), a + b); }
TITAN_ANYWHERE double div(double a, double b) { return TITAN_BY(__ddiv_rn(a, b), a / b); }
TITAN_ANYWHERE double root(double a) { return TITAN_BY(__dsqrt_rn(a), __builtin_sqrt(a)); }
TITAN_ANYWHERE uint32_t bits_of(float x) {
  return TITAN_BY(__float_as_uint(x), __builtin_bit_cast(uint32_t, x));
}
TITAN_ANYWHERE float float_of(uint32_t bits) {
  return TITAN_BY(__uint_as_float(bits), __builtin_bit_cast(float, bits));
}
#undef TITAN_BY

/// The numbers that all parameters of one call share.
struct Rule {
  double lr, beta1, beta2, weight_decay, eps;
  bool decoupled;   ///< the decay multiplies the parameter (AdamW); else it is added to the gradient (Adam)
  bool stochastic;  ///< rounding to bf16
};

/// One parameter's random numbers, and where its local elements are in the whole parameter: in rows of `row` elements, `pitch` apart.
struct Place {
  uint64_t key;
  int64_t first, row, pitch;
};

/// The formula's numbers in one step.
struct Factors {
  float of_grad, decay, decay_in_grad, new_avg, old_square, new_square, step_size, of_root, eps;
  uint32_t step;
};

TITAN_ANYWHERE double power(double base, uint32_t exponent) {
  double result = 1;
  for (; exponent != 0; exponent >>= 1) {
    if (exponent & 1) result = mul(result, base);
    base = mul(base, base);
  }
  return result;
}

TITAN_ANYWHERE Factors factors_of(const Rule& rule, float step, double grad_factor) {
  const auto steps = static_cast<uint32_t>(step);
  return {.of_grad = static_cast<float>(grad_factor),
          .decay = rule.decoupled ? static_cast<float>(add(1.0, -mul(rule.lr, rule.weight_decay))) : 1.0f,
          .decay_in_grad = rule.decoupled ? 0.0f : static_cast<float>(rule.weight_decay),
          .new_avg = static_cast<float>(1 - rule.beta1),
          .old_square = static_cast<float>(rule.beta2),
          .new_square = static_cast<float>(1 - rule.beta2),
          .step_size = static_cast<float>(div(rule.lr, add(1.0, -power(rule.beta1, steps)))),
          .of_root = static_cast<float>(root(add(1.0, -power(rule.beta2, steps)))),
          .eps = static_cast<float>(rule.eps),
          .step = steps};
}

struct Element {
  float param, exp_avg, exp_avg_sq;
};

TITAN_ANYWHERE Element updated(const Element& old, float grad, const Factors& f) {
  grad = add(mul(grad, f.of_grad), mul(f.decay_in_grad, old.param));
  const float avg = add(old.exp_avg, mul(f.new_avg, add(grad, -old.exp_avg)));
  const float square = add(mul(f.old_square, old.exp_avg_sq), mul(mul(f.new_square, grad), grad));
  const float denominator = add(div(root(square), f.of_root), f.eps);
  return {add(mul(old.param, f.decay), -div(mul(f.step_size, avg), denominator)), avg, square};
}

struct RandomWords {
  uint32_t words[4];
};

/// Words 0 and 1 are those of element 2 * pair, 2 and 3 of the next one.
TITAN_ANYWHERE RandomWords random_words(uint64_t key, uint64_t pair, uint32_t step) {
  auto c0 = static_cast<uint32_t>(pair), c1 = static_cast<uint32_t>(pair >> 32);
  uint32_t c2 = step, c3 = 0;
  auto key0 = static_cast<uint32_t>(key), key1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round, key0 += kPhiloxWeyl0, key1 += kPhiloxWeyl1) {
    const uint64_t product0 = uint64_t{kPhiloxMul0} * c0, product1 = uint64_t{kPhiloxMul1} * c2;
    c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ key0;
    c1 = static_cast<uint32_t>(product1);
    c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ key1;
    c3 = static_cast<uint32_t>(product0);
  }
  return {{c0, c1, c2, c3}};
}

TITAN_ANYWHERE float widened(float x) { return x; }
TITAN_ANYWHERE float widened(Bf16 x) { return float_of(static_cast<uint32_t>(x) << 16); }

/// To nearest, or if `stochastic`, up if the 16 bits of `random` carry. Infinities and NaNs stay.
template <class T>
TITAN_ANYWHERE T rounded(float x, uint32_t random, bool stochastic) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return x;
  } else {
    const uint32_t bits = bits_of(x);
    const bool finite = (bits & 0x7f800000u) != 0x7f800000u, nan = (bits & 0x7fffffffu) > 0x7f800000u;
    const uint32_t added = stochastic ? random & 0xffffu : 0x7fffu + (bits >> 16 & 1);
    return static_cast<T>(((bits + (finite ? added : 0)) | (nan ? 0x400000u : 0)) >> 16);
  }
}

}  // namespace titan::ops::adam
