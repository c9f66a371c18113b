// Clipping and the optimizer's step give the same results on a GPU as on the CPU.

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

TEST(ClipOnGpu, LaunchedEqualsTheCpu) {
  if (!dist::open_cuda_plugin()) GTEST_SKIP() << "no GPU is visible";
  const at::Tensor grad = at::randn({64, 33});
  std::vector<Parameter> on_cpu{make_parameter("a", at::zeros_like(grad))};
  std::vector<Parameter> on_gpu{make_parameter("a", at::zeros_like(grad).cuda())};
  set_grad(on_cpu[0], grad.clone());
  set_grad(on_gpu[0], grad.cuda());
  const double expected = clip_grad_norm(on_cpu, 1.0).norm;
  const LaunchedGradNorm launched = launch_clip_grad_norm(on_gpu, 1.0, on_gpu[0].data.local.device());
  EXPECT_NEAR(launched.norm.item<double>() / expected, 1, 1e-6);
  EXPECT_TRUE(at::allclose(on_gpu[0].data.local.grad().cpu(), on_cpu[0].data.local.grad(), 1e-5, 1e-7));
}

}  // namespace
}  // namespace titan::optim
