#include "titan/optim/clip.h"

#include <cmath>
#include <limits>

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include "titan/core/error.h"
#include "titan/dist/world.h"
#include "titan/optim/optimizer.h"
#include "unit/optim/make_parameters.h"

namespace titan::optim {
namespace {

using testing::make_parameter;
using testing::set_grad;

Parameter with_grad(const std::string& name, const at::Tensor& grad) {
  Parameter parameter = make_parameter(name, at::zeros_like(grad));
  set_grad(parameter, grad.clone());
  return parameter;
}

double exact_norm(const std::vector<at::Tensor>& tensors) {
  long double sum = 0;
  for (const auto& tensor : tensors) {
    at::Tensor flat = tensor.to(at::kDouble).contiguous();
    const double* data = flat.const_data_ptr<double>();
    for (int64_t i = 0; i < flat.numel(); ++i) sum += static_cast<long double>(data[i]) * data[i];
  }
  return static_cast<double>(std::sqrt(sum));
}

class ClipDtypes : public ::testing::TestWithParam<at::ScalarType> {};

TEST_P(ClipDtypes, ComputesTheNormInDouble) {
  at::manual_seed(1);
  std::vector<at::Tensor> grads = {at::randn({1000, 257}).to(GetParam()), at::randn({3}).to(GetParam()),
                                   at::randn({40, 30}).to(GetParam()).t(), at::empty({0, 4}, GetParam())};
  std::vector<Parameter> parameters;
  for (const auto& grad : grads) parameters.push_back(with_grad("p", grad));
  parameters.push_back(make_parameter("unused", at::ones({4})));
  double expected = exact_norm(grads);
  GradNorm result = clip_grad_norm(parameters);
  EXPECT_NEAR(result.norm / expected, 1, 1e-13);
  EXPECT_EQ(result.factor, 1);
  EXPECT_TRUE(result.finite());
}

INSTANTIATE_TEST_SUITE_P(All, ClipDtypes,
                         ::testing::Values(at::kFloat, at::kDouble, at::kBFloat16, at::kHalf));

TEST(Clip, ScalesDownToTheLimit) {
  std::vector<Parameter> parameters = {with_grad("a", at::full({4}, 3.0)),
                                       with_grad("b", at::full({4}, -4.0))};
  GradNorm result = clip_grad_norm(parameters, 1.0);
  EXPECT_DOUBLE_EQ(result.norm, 10);
  EXPECT_DOUBLE_EQ(result.factor, 1 / (10 + 1e-6));
  EXPECT_NEAR(clip_grad_norm(parameters).norm, 1, 1e-6);
  EXPECT_NEAR(parameters[1].data.local.grad()[0].item<double>(), -0.4, 1e-6);
}

TEST(Clip, LeavesSmallGradientsUnchanged) {
  at::Tensor grad = at::randn({100}) * 1e-3;
  std::vector<Parameter> parameters = {with_grad("a", grad)};
  clip_grad_norm(parameters, 1.0);
  EXPECT_TRUE(at::equal(parameters[0].data.local.grad(), grad));
}

TEST(Clip, TheNormOfNoGradientsIsZero) {
  EXPECT_EQ(clip_grad_norm({}, 1.0).norm, 0);
  EXPECT_EQ(clip_grad_norm({make_parameter("a", at::ones({2}))}, 1.0).norm, 0);
}

TEST(Clip, DoesNotDependOnTheNumberOfThreads) {
  std::vector<Parameter> parameters = {with_grad("a", at::randn({1 << 20})),
                                       with_grad("b", at::randn({12345}))};
  int threads = at::get_num_threads();
  at::set_num_threads(1);
  double one = clip_grad_norm(parameters).norm;
  for (int count : {2, 3, 7}) {
    at::set_num_threads(count);
    EXPECT_EQ(clip_grad_norm(parameters).norm, one) << count;
  }
  at::set_num_threads(threads);
}

TEST(Clip, LeavesAndReportsNonFiniteGradients) {
  for (double bad : {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
    at::Tensor grad = at::ones({5});
    grad[3] = bad;
    std::vector<Parameter> parameters = {with_grad("a", grad)};
    GradNorm result = clip_grad_norm(parameters, 0.5);
    EXPECT_FALSE(result.finite());
    EXPECT_EQ(result.nonfinite_rank, 0);
    EXPECT_EQ(parameters[0].data.local.grad()[0].item<float>(), 1);
  }
}

TEST(Clip, LargeFloatsDoNotOverflow) {
  std::vector<Parameter> parameters = {with_grad("a", at::full({100}, 1e30))};
  EXPECT_NEAR(clip_grad_norm(parameters).norm / 1e31, 1, 1e-6);
}

// The form that doesn't wait for a GPU returns the same numbers. The optimizer multiplies by its factor.
TEST(Clip, LaunchedNormEqualsTheBlockingOne) {
  at::manual_seed(2);
  const auto make = [](double scale) {
    at::manual_seed(2);
    return std::vector<Parameter>{with_grad("a", at::randn({30, 7}) * scale),
                                  with_grad("b", at::randn({5}) * scale)};
  };
  for (const double scale : {0.01, 3.0, std::numeric_limits<double>::infinity()}) {
    std::vector<Parameter> now = make(scale), launched = make(scale);
    const GradNorm expected = clip_grad_norm(now, 1.0);
    const LaunchedGradNorm norm = launch_grad_norm(launched, 1.0, at::kCPU);
    Optimizer optimizer(launched, {.lr = 0});
    optimizer.step_unless(at::zeros({}), norm.factor);
    const GradNorm result = norm.read(norm.squares.const_data_ptr<double>());
    EXPECT_EQ(result.finite(), expected.finite()) << scale;
    EXPECT_EQ(result.nonfinite_rank, expected.nonfinite_rank) << scale;
    for (size_t i = 0; i < now.size(); ++i)
      EXPECT_TRUE(
          at::equal(launched[i].data.local.grad().nan_to_num(), now[i].data.local.grad().nan_to_num()))
          << scale;
    if (!expected.finite()) continue;
    EXPECT_DOUBLE_EQ(result.norm, expected.norm);
    EXPECT_DOUBLE_EQ(norm.norm.item<double>(), expected.norm);
  }
}

// A pipeline stage may have no parameters, but its rank still computes the whole norm.
TEST(Clip, LaunchedWithoutParametersHasOneValueForEachRankOfThePipeline) {
  const dist::World world = dist::init({.backend = "fake", .fake_rank = 1, .fake_world_size = 3});
  const DeviceMesh pipeline = DeviceMesh::create(world, {{"pp", 3}});
  const LaunchedGradNorm norm = launch_grad_norm({}, 1.0, at::kCPU, pipeline);
  EXPECT_EQ(norm.ranks, (std::vector<int>{0, 1, 2}));
  EXPECT_EQ(norm.squares.numel(), 3);
  const double squares[] = {9, 0, 16};
  EXPECT_EQ(norm.read(squares).norm, 5);
}

}  // namespace
}  // namespace titan::optim
