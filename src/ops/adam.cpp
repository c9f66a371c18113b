// titan::adam_ in operations of LibTorch: the reference for its kernels, to the bit.

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include "ops/operators.h"

namespace titan::ops::composite {

using at::Tensor;

void check_adam(at::TensorList params, at::TensorList grads, at::TensorList exp_avgs,
                at::TensorList exp_avg_sqs, at::IntArrayRef places) {
  TITAN_CHECK(places.size() == 4 * params.size(), "adam_: ", params.size(), " parameters and ", places.size(),
              " numbers of their places");
  TITAN_CHECK(grads.size() == params.size() && exp_avgs.size() == params.size() &&
                  exp_avg_sqs.size() == params.size(),
              "adam_: lists of ", params.size(), ", ", grads.size(), ", ", exp_avgs.size(), " and ",
              exp_avg_sqs.size(), " tensors");
  for (size_t i = 0; i < params.size(); ++i) {
    const auto check = [&](const Tensor& tensor, at::ScalarType dtype) {
      TITAN_CHECK((dtype == at::kFloat || dtype == at::kBFloat16) && tensor.scalar_type() == dtype &&
                      tensor.numel() == params[i].numel() && tensor.is_contiguous(),
                  "adam_: expected ", params[i].numel(), " contiguous elements of fp32 or bf16, got ",
                  tensor.sizes(), " of ", tensor.scalar_type(), ", with strides ", tensor.strides());
    };
    check(params[i], params[0].scalar_type());
    check(grads[i], params[0].scalar_type());
    check(exp_avgs[i], exp_avgs[0].scalar_type());
    check(exp_avg_sqs[i], exp_avgs[0].scalar_type());
    TITAN_CHECK(places[4 * i + 2] > 0, "adam_: rows of ", places[4 * i + 2], " elements");
  }
}

adam::Place adam_place(at::IntArrayRef places, size_t i) {
  return {static_cast<uint64_t>(places[4 * i]), places[4 * i + 1], places[4 * i + 2], places[4 * i + 3]};
}

namespace {

// base^exponent, multiplied in the order of adam::power. exponent: integers below 2^24.
Tensor power(double base, const Tensor& exponent) {
  Tensor result = at::ones_like(exponent, exponent.options().dtype(at::kDouble));
  for (int64_t bit = 1; bit < 1 << 24; bit *= 2, base *= base)
    result = at::where(exponent.bitwise_and(bit).ne(0), result * base, result);
  return result;
}

// ---- random bits, as integers of 64 bits

constexpr int64_t kWord = 0xffffffff;

Tensor high_word(const Tensor& x) { return x.bitwise_right_shift(32).bitwise_and_(kWord); }
Tensor low_word(const Tensor& x) { return x.bitwise_and(kWord); }

// The two words of each element.
std::pair<Tensor, Tensor> random_words(const adam::Place& place, const Tensor& step, int64_t count) {
  const Tensor local = at::arange(count, step.options());
  const Tensor row = local.div(place.row, "floor");
  const Tensor index = row * place.pitch + (local - row * place.row) + place.first;
  const Tensor pair = index.bitwise_right_shift(1);
  Tensor c0 = low_word(pair), c1 = high_word(pair), c2 = step.expand_as(pair), c3 = at::zeros_like(pair);
  auto key0 = static_cast<uint32_t>(place.key), key1 = static_cast<uint32_t>(place.key >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round, key0 += kPhiloxWeyl0, key1 += kPhiloxWeyl1) {
    const Tensor product0 = c0 * int64_t{kPhiloxMul0}, product1 = c2 * int64_t{kPhiloxMul1};
    c0 = high_word(product1).bitwise_xor_(c1).bitwise_xor_(int64_t{key0});
    c1 = low_word(product1);
    c2 = high_word(product0).bitwise_xor_(c3).bitwise_xor_(int64_t{key1});
    c3 = low_word(product0);
  }
  const Tensor second = index.bitwise_and(1).ne(0);
  return {at::where(second, c2, c0), at::where(second, c3, c1)};
}

Tensor rounded(const Tensor& x, const Tensor& random) {
  const Tensor bits = low_word(x.view(at::kInt).to(at::kLong)) + random.bitwise_and(0xffff);
  const Tensor up_or_down = bits.bitwise_right_shift(16).to(at::kShort).view(at::kBFloat16);
  return at::where(x.isfinite(), up_or_down, x.to(at::kBFloat16));
}

}  // namespace

void adam_(at::TensorList params, at::TensorList grads, at::TensorList exp_avgs, at::TensorList exp_avg_sqs,
           at::TensorList steps, at::IntArrayRef places, double lr, double beta1, double beta2,
           double weight_decay, double eps, bool decoupled, bool stochastic,
           const std::optional<Tensor>& grad_factor, const std::optional<Tensor>& skip,
           const std::optional<Tensor>& lr_on_device) {
  check_adam(params, grads, exp_avgs, exp_avg_sqs, places);
  if (params.empty()) return;
  const Tensor all_steps = at::stack(steps).to(at::kLong), rest = 1 - power(beta1, all_steps);
  const Tensor rate = lr_on_device ? lr_on_device->to(at::kDouble) : at::full({}, lr, rest.options());
  const Tensor step_sizes = rate.div(rest).to(at::kFloat),
               of_roots = (1 - power(beta2, all_steps)).sqrt().to(at::kFloat);
  for (size_t i = 0; i < params.size(); ++i) {
    if (params[i].numel() == 0) continue;
    const auto at_i = static_cast<int64_t>(i);
    const Tensor step = all_steps[at_i], step_size = step_sizes[at_i], of_root = of_roots[at_i];
    const auto wide = [](const Tensor& x) { return x.reshape({-1}).to(at::kFloat); };
    const Tensor param = wide(params[i]), exp_avg = wide(exp_avgs[i]), exp_avg_sq = wide(exp_avg_sqs[i]);
    Tensor grad = wide(grads[i]);
    if (grad_factor) grad = grad * grad_factor->to(at::kFloat);
    if (!decoupled) grad = grad + param * weight_decay;
    const Tensor avg = exp_avg + (grad - exp_avg) * (1 - beta1);
    const Tensor square = exp_avg_sq * beta2 + grad * (1 - beta2) * grad;
    // In double, because LibTorch's root of fp32 isn't the nearest number on a CPU.
    const Tensor denominator = square.to(at::kDouble).sqrt().to(at::kFloat) / of_root + eps;
    const Tensor result = (decoupled ? param * (1 - rate * weight_decay).to(at::kFloat) : param) -
                          avg * step_size / denominator;

    std::pair<Tensor, Tensor> words;
    if (stochastic) words = random_words(adam_place(places, i), step, param.numel());
    const auto write = [&](const Tensor& to, const Tensor& value, const Tensor& random) {
      const bool rounds = stochastic && to.scalar_type() == at::kBFloat16;
      const Tensor narrow = rounds ? rounded(value, random) : value.to(to.scalar_type());
      const Tensor kept = to.reshape({-1});
      to.copy_((skip ? at::where(skip->ne(0), kept, narrow) : narrow).view_as(to));
    };
    write(exp_avgs[i], avg, words.first);
    write(exp_avg_sqs[i], square, stochastic ? words.first.bitwise_right_shift(16) : Tensor());
    write(params[i], result, words.second);
  }
}

}  // namespace titan::ops::composite
