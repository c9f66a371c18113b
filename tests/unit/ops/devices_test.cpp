// Every operation gives the same results on a GPU as on the CPU, forward and backward.

#include "dist/device_backend.h"
#include "ops/attention.h"
#include "titan/ops/functional.h"
#include "titan/ops/linear.h"
#include "titan/ops/loss.h"
#include "unit/golden.h"

namespace titan::ops {
namespace {

using Tensors = std::vector<at::Tensor>;

struct DeviceCase {
  const char* name;
  std::vector<std::vector<int64_t>> floating;  // inputs with gradients
  std::vector<std::vector<int64_t>> indices;   // int64 inputs below 7
  std::function<at::Tensor(const Tensors& inputs, const Tensors& indices)> run;
};

void PrintTo(const DeviceCase& value, std::ostream* out) { *out << value.name; }

const std::vector<DeviceCase>& cases() {
  static const std::vector<DeviceCase> all = {
      {"rms_norm",
       {{4, 6, 32}, {32}},
       {},
       [](const Tensors& x, const Tensors&) { return rms_norm(x[0], x[1], 1e-5); }},
      {"rotary",
       {{2, 6, 4, 8}},
       {},
       [](const Tensors& x, const Tensors&) {
         return rotary(x[0], at::linspace(-1, 1, 48, x[0].options().dtype(at::kFloat)).view({6, 8}));
       }},
      {"swiglu", {{3, 40}, {3, 40}}, {}, [](const Tensors& x, const Tensors&) { return swiglu(x[0], x[1]); }},
      {"linear",
       {{5, 16}, {24, 16}, {24}},
       {},
       [](const Tensors& x, const Tensors&) { return linear(x[0], x[1], x[2], default_products()); }},
      {"causal_attention",
       {{2, 33, 4, 16}, {2, 33, 2, 16}, {2, 33, 2, 16}},
       {},
       [](const Tensors& x, const Tensors&) { return causal_attention(x[0], x[1], x[2]); }},
      {"kernel_attention",
       {{2, 33, 4, 16}, {2, 33, 2, 16}, {2, 33, 2, 16}},
       {},
       [](const Tensors& x, const Tensors&) {
         return kernel_attention({x[0], x[1], x[2]});
       }},
      {"kernel_attention_of_odd_heads",
       {{2, 33, 4, 20}, {2, 33, 2, 20}, {2, 33, 2, 20}},
       {},
       [](const Tensors& x, const Tensors&) {
         return kernel_attention({x[0], x[1], x[2]});
       }},
      {"embedding",
       {{7, 12}},
       {{3, 20}},
       [](const Tensors& x, const Tensors& indices) { return embedding(x[0], indices[0], nullptr); }},
      {"linear_cross_entropy",
       {{3, 20, 12}, {7, 12}},
       {{3, 20}},
       [](const Tensors& x, const Tensors& indices) {
         return linear_cross_entropy(x[0], x[1], indices[0],
                                     {.global_valid_tokens = 60, .products = default_products()});
       }}};
  return all;
}

struct Outcome {
  at::Tensor output;
  Tensors gradients;
};

Outcome outcome_on(at::Device device, const DeviceCase& c, at::ScalarType dtype) {
  at::manual_seed(3);
  Tensors inputs, indices;
  for (const auto& sizes : c.floating) inputs.push_back(at::randn(sizes).to(device, dtype).requires_grad_());
  for (const auto& sizes : c.indices) indices.push_back(at::randint(7, sizes).to(device));
  Outcome outcome;
  outcome.output = c.run(inputs, indices);
  outcome.output.backward(at::linspace(-1, 1, outcome.output.numel())
                              .view(outcome.output.sizes())
                              .to(device, outcome.output.scalar_type()));
  for (const at::Tensor& input : inputs) outcome.gradients.push_back(input.grad().cpu());
  outcome.output = outcome.output.detach().cpu();
  return outcome;
}

class OnGpu : public ::testing::TestWithParam<std::tuple<DeviceCase, at::ScalarType>> {};

TEST_P(OnGpu, EqualsTheCpu) {
  if (!dist::open_cuda_plugin()) GTEST_SKIP() << "no GPU is visible";
  const auto& [c, dtype] = GetParam();
  const Outcome expected = outcome_on(at::kCPU, c, dtype),
                got = outcome_on(at::Device(at::kCUDA, 0), c, dtype);
  const double tolerance = dtype == at::kFloat ? 1e-5 : 1.5e-2;
  EXPECT_CLOSE(got.output, expected.output, tolerance);
  for (size_t i = 0; i < expected.gradients.size(); ++i)
    EXPECT_CLOSE(got.gradients[i], expected.gradients[i], tolerance) << "input " << i;
}

INSTANTIATE_TEST_SUITE_P(Operations, OnGpu,
                         ::testing::Combine(::testing::ValuesIn(cases()),
                                            ::testing::Values(at::kFloat, at::kBFloat16)),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param).name) +
                                  c10::toString(std::get<1>(info.param));
                         });

// The cases themselves, also without a GPU: fp32 against float64 on the CPU.
class InFp32 : public ::testing::TestWithParam<DeviceCase> {};

TEST_P(InFp32, IsNearFloat64) {
  const DeviceCase& c = GetParam();
  const Outcome expected = outcome_on(at::kCPU, c, at::kDouble), got = outcome_on(at::kCPU, c, at::kFloat);
  EXPECT_CLOSE(got.output, expected.output, 1e-5);
  for (size_t i = 0; i < expected.gradients.size(); ++i)
    EXPECT_CLOSE(got.gradients[i], expected.gradients[i], 1e-5) << "input " << i;
}

INSTANTIATE_TEST_SUITE_P(Operations, InFp32, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace titan::ops
