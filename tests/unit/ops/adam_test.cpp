// titan::adam_: its kernels against the operations of LibTorch that are their reference, and its rounding.

#include <cmath>
#include <limits>
#include <numeric>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "dist/device_backend.h"
#include "ops/operators.h"

namespace titan::ops {
namespace {

using at::Tensor;

constexpr int64_t kKey = 0x0123456789abcdef;

struct Numbers {
  double lr = 0.01, beta1 = 0.9, beta2 = 0.95, weight_decay = 0.1, eps = 1e-8;
  bool decoupled = true, stochastic = true;
};

// Parameters of several sizes, one of them in rows that are apart in the whole parameter, and their states.
struct AdamState {
  std::vector<Tensor> params, grads, exp_avgs, exp_avg_sqs, steps;
  std::vector<int64_t> places;

  void add(const Tensor& param, const Tensor& grad, at::ScalarType state_dtype,
           const std::vector<int64_t>& place) {
    params.push_back(param.clone());
    grads.push_back(grad.clone());
    exp_avgs.push_back(at::zeros_like(param, param.options().dtype(state_dtype)));
    exp_avg_sqs.push_back(at::zeros_like(exp_avgs.back()));
    steps.push_back(at::zeros({}, param.options().dtype(at::kFloat)));
    places.insert(places.end(), place.begin(), place.end());
  }
  AdamState to(at::Device device) const {
    AdamState moved = *this;
    for (auto* list : moved.lists())
      for (Tensor& tensor : *list) tensor = tensor.to(device, tensor.scalar_type(), false, /*copy=*/true);
    return moved;
  }
  std::vector<std::vector<Tensor>*> lists() { return {&params, &grads, &exp_avgs, &exp_avg_sqs, &steps}; }

  void step(decltype(composite::adam_)& function, const Numbers& n, std::optional<Tensor> factor = {},
            std::optional<Tensor> skip = {}, std::optional<Tensor> lr = {}) {
    for (Tensor& count : steps) count.add_(1);
    function(params, grads, exp_avgs, exp_avg_sqs, steps, places, n.lr, n.beta1, n.beta2, n.weight_decay,
             n.eps, n.decoupled, n.stochastic, factor, skip, lr);
  }
};

void by_kernel(at::TensorList params, at::TensorList grads, at::TensorList exp_avgs,
               at::TensorList exp_avg_sqs, at::TensorList steps, at::IntArrayRef places, double lr,
               double beta1, double beta2, double weight_decay, double eps, bool decoupled, bool stochastic,
               const std::optional<Tensor>& factor, const std::optional<Tensor>& skip,
               const std::optional<Tensor>& lr_on_device) {
  find_operator<decltype(composite::adam_)>("titan::adam_")
      .call(params, grads, exp_avgs, exp_avg_sqs, steps, places, lr, beta1, beta2, weight_decay, eps,
            decoupled, stochastic, factor, skip, lr_on_device);
}

AdamState some_tensors(at::ScalarType param_dtype, at::ScalarType state_dtype) {
  AdamState all;
  const auto add = [&](at::IntArrayRef sizes, const std::vector<int64_t>& place) {
    all.add(at::randn(sizes).to(param_dtype), at::randn(sizes).to(param_dtype), state_dtype, place);
  };
  add({70'000}, {kKey, 5, 70'000, 0});              // several thread blocks, from an odd index on
  add({300, 67}, {-kKey, 11, 67, 1000});            // rows shorter than a thread block
  add({5, 20'000}, {kKey + 1, 2, 20'000, 40'001});  // longer ones
  add({40, 1}, {kKey + 2, 3, 1, 7});
  add({0, 3}, {kKey + 3, 0, 1, 0});
  add({3}, {kKey + 4, int64_t{1} << 40, 3, 0});
  for (int64_t i = 0; i < 40; ++i) add({2 + i}, {i, i, 2 + i, 0});  // more than one launch
  return all;
}

void expect_same_bits(AdamState got, AdamState expected, const std::string& what) {
  for (size_t list = 0; list < 5; ++list)
    for (size_t i = 0; i < expected.params.size(); ++i) {
      const Tensor &a = (*got.lists()[list])[i], b = (*expected.lists()[list])[i];
      ASSERT_TRUE(at::equal(a.cpu(), b.cpu())) << what << ": list " << list << ", tensor " << i;
    }
}

std::string title(at::ScalarType param, at::ScalarType state, const Numbers& n) {
  return titan::str(param, " with states of ", state, n.decoupled ? ", AdamW" : ", Adam",
                    n.stochastic ? ", stochastic" : ", to nearest");
}

template <class Check>
void for_all_kinds(Check check) {
  for (const at::ScalarType param : {at::kFloat, at::kBFloat16})
    for (const at::ScalarType state : {at::kFloat, at::kBFloat16})
      for (const bool decoupled : {true, false})
        for (const bool stochastic : {true, false}) {
          const Numbers numbers{.decoupled = decoupled, .stochastic = stochastic};
          at::manual_seed(1);
          check(some_tensors(param, state), numbers, title(param, state, numbers));
        }
}

TEST(Adam, KernelEqualsTheReference) {
  for_all_kinds([](AdamState expected, const Numbers& numbers, const std::string& what) {
    AdamState got = expected.to(at::kCPU);
    const Tensor factor = at::full({}, 0.3, at::kDouble);
    for (int step = 0; step < 3; ++step) {
      expected.step(composite::adam_, numbers, factor);
      got.step(by_kernel, numbers, factor);
    }
    expect_same_bits(got, expected, what);
  });
}

TEST(Adam, ALearningRateInATensorTakesThePlaceOfTheNumber) {
  const auto rate = at::full({}, 0.03, at::kFloat);
  AdamState given = some_tensors(at::kFloat, at::kBFloat16), in_tensor = given.to(at::kCPU),
            reference = given.to(at::kCPU);
  given.step(by_kernel, {.lr = rate.item<float>()});
  in_tensor.step(by_kernel, {.lr = 7}, {}, {}, rate);
  reference.step(composite::adam_, {.lr = 7}, {}, {}, rate);
  expect_same_bits(in_tensor, given, "the kernel");
  expect_same_bits(reference, given, "the reference");
}

TEST(AdamOnGpu, EqualsTheCpu) {
  if (!dist::open_cuda_plugin()) GTEST_SKIP() << "no GPU is visible";
  for_all_kinds([](AdamState expected, const Numbers& numbers, const std::string& what) {
    AdamState got = expected.to(at::kCUDA);
    const Tensor factor = at::full({}, 0.3, at::kDouble), run = at::zeros({}, at::kFloat),
                 skip = at::ones({}, at::kFloat);
    for (int step = 0; step < 3; ++step) {
      expected.step(by_kernel, numbers, factor, run);
      got.step(by_kernel, numbers, factor.cuda(), run.cuda());
    }
    expected.step(by_kernel, numbers, factor, skip);
    got.step(by_kernel, numbers, factor.cuda(), skip.cuda());
    const Tensor rate = at::full({}, 0.02, at::kFloat);
    expected.step(by_kernel, numbers, factor, run, rate);
    got.step(by_kernel, numbers, factor.cuda(), run.cuda(), rate.cuda());
    expect_same_bits(got, expected, what);
  });
}

TEST(AdamOnGpu, KernelEqualsTheReference) {
  if (!dist::open_cuda_plugin()) GTEST_SKIP() << "no GPU is visible";
  AdamState expected = some_tensors(at::kBFloat16, at::kBFloat16).to(at::kCUDA), got = expected.to(at::kCUDA);
  expected.step(composite::adam_, {});
  got.step(by_kernel, {});
  expect_same_bits(got, expected, "on a GPU");
}

// Parameters whose memory isn't aligned to 16 bytes.
TEST(AdamOnGpu, TakesParametersAtAnyAddress) {
  if (!dist::open_cuda_plugin()) GTEST_SKIP() << "no GPU is visible";
  AdamState expected, got;
  const Tensor values = at::randn({5001}), grad = at::randn({5001});
  expected.add(values.slice(0, 1), grad.slice(0, 1), at::kBFloat16, {kKey, 0, 5000, 0});
  got = expected.to(at::kCUDA);
  const Tensor memory = values.cuda();
  got.params[0] = memory.slice(0, 1);
  expected.step(by_kernel, {});
  got.step(by_kernel, {});
  expect_same_bits(got, expected, "from the second element on");
}

TEST(Adam, SkipsAStep) {
  AdamState tensors = some_tensors(at::kFloat, at::kBFloat16);
  tensors.step(by_kernel, {});
  for (auto* function : {&by_kernel, &composite::adam_}) {
    AdamState skipping = tensors.to(at::kCPU);
    skipping.step(*function, {}, {}, at::ones({}, at::kFloat));
    for (Tensor& count : skipping.steps) count.sub_(1);
    expect_same_bits(skipping, tensors, "skipped");
  }
}

// Whatever shares a parameter, its elements have the same random numbers.
TEST(Adam, PartsEqualTheWhole) {
  const int64_t rows = 12, columns = 35;
  const Tensor values = at::randn({rows, columns}), grad = at::randn({rows, columns});
  AdamState whole;
  whole.add(values, grad, at::kBFloat16, {kKey, 0, rows * columns, 0});
  for (int step = 0; step < 3; ++step) whole.step(by_kernel, {});
  for (const auto& [first_row, num_rows, first_column, num_columns] :
       std::vector<std::array<int64_t, 4>>{{0, 6, 0, 35}, {6, 6, 0, 35}, {0, 12, 1, 17}, {5, 3, 18, 17}}) {
    const auto part_of = [&](const Tensor& x) {
      return x.narrow(0, first_row, num_rows).narrow(1, first_column, num_columns).contiguous();
    };
    AdamState part;
    part.add(part_of(values), part_of(grad), at::kBFloat16,
             {kKey, first_row * columns + first_column, num_columns, columns});
    for (int step = 0; step < 3; ++step) part.step(by_kernel, {});
    EXPECT_TRUE(at::equal(part.params[0], part_of(whole.params[0])));
    EXPECT_TRUE(at::equal(part.exp_avgs[0], part_of(whole.exp_avgs[0])));
    EXPECT_TRUE(at::equal(part.exp_avg_sqs[0], part_of(whole.exp_avg_sqs[0])));
  }
}

// One step of many equal elements under many keys: each result is one of the two neighbors, and their mean is the exact value.
TEST(Adam, StochasticRoundingIsUnbiased) {
  const int64_t count = 4096;
  const double grad = 0.7371;
  double avg = 0, avg_sq = 0, param = 0;
  const int keys = 64;
  for (int64_t key = 0; key < keys; ++key) {
    AdamState tensors;
    tensors.add(at::full({count}, 1.0).to(at::kBFloat16), at::full({count}, grad).to(at::kBFloat16),
                at::kBFloat16, {key * kKey, 0, count, 0});
    tensors.step(by_kernel, {.lr = 0.0013, .weight_decay = 0});
    EXPECT_EQ(std::get<0>(at::_unique(tensors.exp_avgs[0].to(at::kFloat))).numel(), 2);
    avg += tensors.exp_avgs[0].to(at::kDouble).mean().item<double>() / keys;
    avg_sq += tensors.exp_avg_sqs[0].to(at::kDouble).mean().item<double>() / keys;
    param += tensors.params[0].to(at::kDouble).mean().item<double>() / keys;
  }
  const double of_bf16 = at::full({}, grad).to(at::kBFloat16).item<double>();
  // The mean of n results between neighbors d apart is within 5 standard deviations, at most d / 2 / sqrt(n) each.
  const double few = 5 * 0.5 / std::sqrt(static_cast<double>(count * keys));
  EXPECT_NEAR(avg, 0.1 * of_bf16, few * std::ldexp(1, -4 - 7));
  EXPECT_NEAR(avg_sq, 0.05 * of_bf16 * of_bf16, few * std::ldexp(1, -6 - 7));
  EXPECT_NEAR(param, 1 - 0.0013, few * std::ldexp(1, -1 - 7));
}

// Decay by 1 - beta2 = 0.001 is less than half of the distance of bf16 numbers: to nearest, an average never shrinks.
TEST(Adam, StochasticRoundingKeepsSmallUpdates) {
  for (const bool stochastic : {true, false}) {
    AdamState tensors;
    tensors.add(at::zeros({4096}), at::zeros({4096}), at::kBFloat16, {kKey, 0, 4096, 0});
    tensors.exp_avg_sqs[0].fill_(1.5);
    for (int step = 0; step < 500; ++step)
      tensors.step(by_kernel, {.lr = 0, .beta2 = 0.999, .stochastic = stochastic});
    const double mean = tensors.exp_avg_sqs[0].to(at::kDouble).mean().item<double>();
    if (stochastic)
      EXPECT_NEAR(mean, 1.5 * std::pow(0.999, 500), 0.01);
    else
      EXPECT_EQ(mean, 1.5);
  }
}

// The random bits of all elements, steps, keys and tensors differ.
TEST(Adam, RandomBitsAreIndependent) {
  const auto ups = [](int64_t key, int64_t first, int steps) {
    AdamState tensors;
    tensors.add(at::zeros({8192}), at::full({8192}, 0.7371), at::kBFloat16, {key, first, 8192, 0});
    tensors.steps[0].fill_(steps);
    tensors.step(by_kernel, {.lr = 0});
    const Tensor avg = tensors.exp_avgs[0].to(at::kDouble), sq = tensors.exp_avg_sqs[0].to(at::kDouble);
    return std::pair(avg.gt(avg.mean()).to(at::kDouble), sq.gt(sq.mean()).to(at::kDouble));
  };
  const auto correlation = [](Tensor a, Tensor b) {
    a = a - a.mean(), b = b - b.mean();
    return (a * b).mean().div((a.square().mean() * b.square().mean()).sqrt()).abs().item<double>();
  };
  const auto [avg, square] = ups(kKey, 0, 0);
  const double few = 5 / std::sqrt(8192.0);
  EXPECT_LT(correlation(avg, square), few);
  EXPECT_LT(correlation(avg, ups(kKey, 0, 1).first), few);
  EXPECT_LT(correlation(avg, ups(kKey + 1, 0, 0).first), few);
  EXPECT_LT(correlation(avg, ups(kKey, 8192, 0).first), few);
  EXPECT_LT(correlation(avg.slice(0, 1), avg.slice(0, 0, 8191)), few);
  EXPECT_TRUE(at::equal(avg.slice(0, 100), ups(kKey, 100, 0).first.slice(0, 0, 8092)));
}

TEST(Adam, KeepsInfinitiesAndNaNs) {
  for (const bool stochastic : {true, false}) {
    AdamState tensors;
    const float inf = std::numeric_limits<float>::infinity();
    tensors.add(at::zeros({3}), at::tensor({inf, -inf, NAN}), at::kBFloat16, {kKey, 0, 3, 0});
    tensors.step(by_kernel, {.stochastic = stochastic});
    const Tensor avg = tensors.exp_avgs[0].to(at::kFloat);
    EXPECT_EQ(avg[0].item<float>(), inf);
    EXPECT_EQ(avg[1].item<float>(), -inf);
    EXPECT_TRUE(std::isnan(avg[2].item<float>()));
  }
}

TEST(Adam, RefusesWhatItCannotStep) {
  AdamState doubles;
  doubles.add(at::zeros({3}, at::kDouble), at::zeros({3}, at::kDouble), at::kBFloat16, {kKey, 0, 3, 0});
  EXPECT_THROW(doubles.step(by_kernel, {}), Error);
  AdamState strided;
  strided.add(at::zeros({3, 4}), at::zeros({3, 4}), at::kBFloat16, {kKey, 0, 12, 0});
  strided.params[0] = at::zeros({4, 3}).t();
  EXPECT_THROW(strided.step(by_kernel, {}), Error);
}

}  // namespace
}  // namespace titan::ops
