// Clipping and the optimizer's step give the same results on a GPU as on the CPU.

#include <limits>

#include <gtest/gtest.h>

#include "dist/device_backend.h"
#include "titan/optim/clip.h"
#include "titan/optim/optimizer.h"
#include "unit/optim/make_parameters.h"

namespace titan::optim {
namespace {

using testing::make_parameter;
using testing::set_grad;

struct Stepped {
  double norm = 0;
  std::vector<at::Tensor> parameters;
};

Stepped step_on(at::Device device, const std::string& implementation) {
  at::manual_seed(5);
  std::vector<Parameter> parameters;
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{40, 9}, {17}}) {
    parameters.push_back(make_parameter("p" + std::to_string(sizes.size()), at::randn(sizes).to(device)));
    set_grad(parameters.back(), at::randn(sizes).to(device));
  }
  Optimizer optimizer(parameters, {.lr = 0.01, .implementation = implementation});
  Stepped result;
  for (int i = 0; i < 3; ++i) {
    result.norm = clip_grad_norm(parameters, 1.0).norm;
    optimizer.step();
  }
  for (const Parameter& parameter : parameters)
    result.parameters.push_back(parameter.data.local.detach().cpu());
  return result;
}

class OptimizerOnGpu : public ::testing::TestWithParam<const char*> {};

TEST_P(OptimizerOnGpu, EqualsTheCpu) {
  if (!dist::open_cuda_plugin()) GTEST_SKIP() << "no GPU is visible";
  const Stepped expected = step_on(at::kCPU, GetParam()), got = step_on(at::Device(at::kCUDA, 0), GetParam());
  EXPECT_NEAR(got.norm / expected.norm, 1, 1e-6);
  for (size_t i = 0; i < expected.parameters.size(); ++i)
    EXPECT_TRUE(at::allclose(got.parameters[i], expected.parameters[i], 1e-5, 1e-6)) << i;
}

INSTANTIATE_TEST_SUITE_P(Implementations, OptimizerOnGpu, ::testing::Values("fused", "foreach", "for-loop"));

// Steps by gradients that are clipped, and one that isn't finite. Adam multiplies fp32 gradients while it updates; float64 ones, and those that
// aren't laid out as their parameter, are multiplied before.
class ClipOnGpu : public ::testing::TestWithParam<std::tuple<const char*, at::ScalarType, bool>> {};

TEST_P(ClipOnGpu, LaunchedEqualsTheCpu) {
  if (!dist::open_cuda_plugin()) GTEST_SKIP() << "no GPU is visible";
  const auto& [name, dtype, transposed] = GetParam();
  const at::Tensor start = at::randn({64, 33}, dtype), grad = at::randn({64, 33}, dtype);
  const auto laid_out = [transposed = transposed](const at::Tensor& g) {
    return transposed ? g.t().contiguous().t() : g.clone();
  };
  std::vector<Parameter> on_cpu{make_parameter("a", start)}, on_gpu{make_parameter("a", start.cuda())};
  Optimizer cpu(on_cpu, {.name = name, .lr = 0.1}), gpu(on_gpu, {.name = name, .lr = 0.1});
  const at::Device device = on_gpu[0].data.local.device();
  const double tolerance = dtype == at::kFloat ? 1e-5 : 1e-12;
  for (const double scale : {1.0, 1e-4, std::numeric_limits<double>::infinity(), 3.0}) {
    set_grad(on_cpu[0], grad * scale);
    set_grad(on_gpu[0], laid_out((grad * scale).to(device)));
    const GradNorm expected = clip_grad_norm(on_cpu, 1.0);
    if (expected.finite()) cpu.step();
    const LaunchedGradNorm launched = launch_grad_norm(on_gpu, 1.0, device);
    gpu.step_unless(launched.norm.isfinite().logical_not().to(at::kFloat), launched.factor);
    EXPECT_TRUE(at::allclose(on_gpu[0].data.local.cpu(), on_cpu[0].data.local, tolerance, tolerance));
    if (!expected.finite()) continue;
    EXPECT_NEAR(launched.norm.item<double>() / expected.norm, 1, 1e-6);
    EXPECT_TRUE(
        at::allclose(on_gpu[0].data.local.grad().cpu(), on_cpu[0].data.local.grad(), tolerance, 1e-7));
  }
}

INSTANTIATE_TEST_SUITE_P(Rules, ClipOnGpu,
                         ::testing::Combine(::testing::Values("AdamW", "Adam"),
                                            ::testing::Values(at::kFloat, at::kDouble), ::testing::Bool()));

}  // namespace
}  // namespace titan::optim
