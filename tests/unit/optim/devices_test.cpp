// Clipping and the optimizer's step give the same results on a GPU as on the CPU.

#include <limits>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "dist/device_backend.h"
#include "dist/stream.h"
#include "dist/work_graph.h"
#include "titan/core/error.h"
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

// A factor that was rounded to 16 bits would change a part of the products.
TEST(ClippedGradientsOnGpu, AreRoundedOnce) {
  if (!dist::open_cuda_plugin()) GTEST_SKIP() << "no GPU is visible";
  const at::Tensor grad = at::randn({64, 33}, at::kBFloat16);
  const std::vector<Parameter> parameters{make_parameter("a", at::zeros_like(grad).cuda())};
  Optimizer optimizer(parameters, {.lr = 0.1});
  set_grad(parameters[0],
           grad.t().contiguous().cuda().t());  // so that the optimizer doesn't multiply it itself
  const at::Device device = parameters[0].data.local.device();
  const LaunchedGradNorm launched = launch_grad_norm(parameters, 1.0, device);
  optimizer.step_unless(at::zeros({}, at::dtype(at::kFloat).device(device)), launched.factor);
  const double factor = launched.factor.item<double>();
  ASSERT_LT(factor, 0.1);
  const at::Tensor expected = grad.to(at::kDouble).mul(factor).to(at::kBFloat16);
  EXPECT_TRUE(at::equal(parameters[0].data.local.grad().cpu(), expected));
}

// Two groups of parameters with settings of their own.
struct Trained {
  explicit Trained(const char* name, at::ScalarType dtype) {
    for (const auto& [parameter, sizes] :
         std::map<std::string, std::vector<int64_t>>{{"w", {40, 9}}, {"bias", {17}}}) {
      at::Tensor values = at::linspace(-1, 1, sizes.size() == 1 ? sizes[0] : sizes[0] * sizes[1]);
      parameters.push_back(make_parameter(parameter, values.view(sizes).to(dtype).cuda()));
      gradients.push_back(at::empty_like(parameters.back().data.local));
    }
    const char* group = "bias: lr=0.03, weight_decay=0";
    optimizer.emplace(parameters, OptimizerSettings{.name = name, .lr = 0.1, .param_groups = {group}});
  }
  // At the same addresses in each step.
  void take_gradients(int step) {
    for (size_t i = 0; i < parameters.size(); ++i) {
      gradients[i].copy_(parameters[i].data.local.detach().add(step).sin_());
      set_grad(parameters[i], gradients[i]);
    }
  }
  std::vector<at::Tensor> numbers() {
    std::vector<at::Tensor> result;
    for (const Parameter& parameter : parameters) result.push_back(parameter.data.local.detach().cpu());
    for (const auto& [parameter, state] : optimizer->state())
      for (const auto& [name, tensor] : state) result.push_back(tensor.local.cpu());
    return result;
  }

  std::vector<Parameter> parameters;
  std::vector<at::Tensor> gradients;
  std::optional<Optimizer> optimizer;
};

class RecordedUpdateOnGpu : public ::testing::TestWithParam<std::tuple<const char*, at::ScalarType>> {};

// To the bit, while learning rates change, and when a step is skipped.
TEST_P(RecordedUpdateOnGpu, EqualsTheUsualOne) {
  if (!dist::open_cuda_plugin()) GTEST_SKIP() << "no GPU is visible";
  const auto& [name, dtype] = GetParam();
  const at::Device gpu(at::kCUDA, 0);
  const dist::StreamGuard on_stream(dist::Stream::create(gpu));
  Trained usual(name, dtype), recorded(name, dtype);
  ASSERT_TRUE(recorded.optimizer->can_be_recorded());
  const at::Tensor skip = at::zeros({}, at::dtype(at::kFloat).device(gpu)), factor = skip.to(at::kDouble);
  dist::WorkGraph graph(gpu);
  for (int step = 0; step < 7; ++step) {
    skip.fill_(step == 3 ? 1 : 0);
    factor.fill_(1.0 / (step + 3));
    for (Trained* each : {&usual, &recorded}) {
      each->optimizer->set_lr_factor(1.0 / (step + 1));
      each->take_gradients(step);
    }
    usual.optimizer->step_unless(skip, factor);
    if (step == 0) {
      recorded.optimizer->step_unless(skip, factor);
    } else {
      recorded.optimizer->write_lrs();
      if (step == 1) graph.record([&] { recorded.optimizer->record_step_unless(skip, factor); });
      graph.launch();
    }
    const auto expected = usual.numbers(), got = recorded.numbers();
    for (size_t i = 0; i < expected.size(); ++i)
      EXPECT_TRUE(at::equal(got[i], expected[i])) << step << " " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Rules, RecordedUpdateOnGpu,
                         ::testing::Combine(::testing::Values("AdamW", "Adam"),
                                            ::testing::Values(at::kFloat, at::kBFloat16)));

// The learning rate in memory is fp32.
TEST(RecordedUpdatesOnGpu, AreRefusedInFloat64) {
  if (!dist::open_cuda_plugin()) GTEST_SKIP() << "no GPU is visible";
  Trained trained("AdamW", at::kDouble);
  EXPECT_FALSE(trained.optimizer->can_be_recorded());
  EXPECT_THROW(trained.optimizer->record_step_unless({}), Error);
}

}  // namespace
}  // namespace titan::optim
