// Functions that take the list of parameters (gradient norm, optimizer), with parameters sharded and
// replicated over meshes.

#include <cmath>
#include <ios>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "distributed/world.h"
#include "titan/optim/clip.h"
#include "titan/optim/optimizer.h"

namespace titan {
namespace {

using testing::device;
using testing::world;

const Placement S0 = Placement::shard(0), S1 = Placement::shard(1), R = Placement::replicate();

struct Whole {
  std::string name;
  at::Tensor values;
  at::Tensor grad;
  std::vector<Placement> placements;
};

Parameter place(const Whole& whole, const DeviceMesh& mesh) {
  Parameter parameter;
  parameter.name = whole.name;
  parameter.data = distribute(whole.values, mesh, whole.placements);
  parameter.data.local = parameter.data.local.clone().requires_grad_(true);
  parameter.data.local.mutable_grad() = distribute(whole.grad, mesh, whole.placements).local.clone();
  parameter.compute = parameter.data.local;
  return parameter;
}

Whole make_whole(const std::string& name, at::IntArrayRef shape, std::vector<Placement> placements,
                 at::ScalarType dtype = at::kDouble) {
  const auto draw = [&] { return at::randn(shape, dtype).to(device()); };
  const at::Tensor values = draw();
  return {name, values, draw(), std::move(placements)};
}

// Parameters with the same values on every rank, over two axes with 4 ranks, otherwise one.
struct Job {
  DeviceMesh mesh;
  std::vector<Whole> wholes;
  std::vector<Parameter> parameters;
};

Job make_job(at::ScalarType dtype = at::kDouble) {
  at::manual_seed(7);
  Job job;
  const auto make_whole = [&](const char* name, at::IntArrayRef shape, std::vector<Placement> placements) {
    return titan::make_whole(name, shape, std::move(placements), dtype);
  };
  if (world().size() == 4) {
    job.mesh = DeviceMesh::create(world(), {{"dp", 2}, {"tp", 2}});
    job.wholes = {make_whole("a", {7, 5}, {S0, S1}), make_whole("norm", {5}, {S0, R}),
                  make_whole("b", {3, 6}, {R, S0}), make_whole("bias", {4}, {R, R}),
                  make_whole("tiny", {1, 2}, {S0, S0})};
  } else {
    job.mesh = DeviceMesh::create(world(), {{"dp", world().size()}});
    job.wholes = {make_whole("a", {7, 5}, {S0}), make_whole("norm", {5}, {R}),
                  make_whole("tiny", {1, 2}, {S0})};
  }
  for (const auto& whole : job.wholes) job.parameters.push_back(place(whole, job.mesh));
  return job;
}

double norm_of(const std::vector<Whole>& wholes) {
  double squares = 0;
  for (const auto& whole : wholes) squares += whole.grad.square().sum().item<double>();
  return std::sqrt(squares);
}

TEST(ShardedParameters, GradNormCountsEachElementOnce) {
  Job job = make_job();
  double expected = norm_of(job.wholes);
  auto result = optim::clip_grad_norm(job.parameters, 1.0);
  EXPECT_NEAR(result.norm / expected, 1, 1e-13);
  EXPECT_NEAR(optim::clip_grad_norm(job.parameters).norm, 1, 1e-6);
  auto norms =
      job.mesh.world().everyone()->all_gather_text(titan::str(std::hexfloat, result.norm), {.phase = "test"});
  for (const auto& norm : norms) EXPECT_EQ(norm, norms.front());
}

TEST(ShardedParameters, GradNormSpansSeveralMeshes) {
  Job job = make_job();
  Whole alone = make_whole("alone", {3}, {});
  job.wholes.push_back(alone);
  job.parameters.push_back(place(alone, DeviceMesh()));
  EXPECT_NEAR(optim::clip_grad_norm(job.parameters).norm / norm_of(job.wholes), 1, 1e-13);
}

TEST(ShardedParameters, ARankWithoutGradientParticipates) {
  Job job = make_job();
  for (auto& parameter : job.parameters) {
    if (world().rank() == 0) parameter.data.local.mutable_grad().reset();
  }
  EXPECT_TRUE(optim::clip_grad_norm(job.parameters).finite());
}

TEST(ShardedParameters, NonFiniteGradientsNameTheirRank) {
  Job job = make_job();
  int culprit = world().size() - 1;
  // Only a parameter that is sharded over all ranks is certain to count on the last rank.
  if (world().rank() == culprit) job.parameters[0].data.local.mutable_grad().fill_(std::nan(""));
  auto result = optim::clip_grad_norm(job.parameters, 1.0);
  EXPECT_EQ(result.nonfinite_rank, culprit);
  EXPECT_FALSE(result.finite());
}

// Results are equal up to the last bits, because the kernels' vectors begin at other elements.
TEST(ShardedParameters, OptimizerStepsShardsLikeTheWhole) {
  Job job = make_job();
  std::vector<Parameter> wholes;
  for (auto whole : job.wholes) {
    whole.placements.clear();
    wholes.push_back(place(whole, DeviceMesh()));
  }
  optim::Optimizer sharded(job.parameters, {.lr = 0.1, .param_groups = {}}),
      single(wholes, {.lr = 0.1, .param_groups = {}});
  for (int step = 0; step < 3; ++step) {
    sharded.step();
    single.step();
  }
  auto state = sharded.state(), expected = single.state();
  for (size_t i = 0; i < wholes.size(); ++i) {
    const auto& name = wholes[i].name;
    EXPECT_TRUE(
        at::allclose(full_tensor(job.parameters[i].data), wholes[i].data.local.detach(), 1e-13, 1e-15))
        << name;
    EXPECT_TRUE(at::allclose(full_tensor(state.find(name)->second.at("exp_avg_sq")),
                             expected.find(name)->second.at("exp_avg_sq").local, 1e-13, 1e-15))
        << name;
    EXPECT_EQ(state.find(name)->second.at("step").local.item<float>(), 3);
  }
}

TEST(ShardedParameters, StochasticRoundingIsThatOfTheWhole) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    Job job = make_job(dtype);
    std::vector<Parameter> wholes;
    for (auto whole : job.wholes) {
      whole.placements.clear();
      wholes.push_back(place(whole, DeviceMesh()));
    }
    const optim::OptimizerSettings settings{
        .lr = 0.1, .state_dtype = "bfloat16", .stochastic_rounding = true, .seed = 3};
    optim::Optimizer sharded(job.parameters, settings), single(wholes, settings);
    for (int step = 0; step < 3; ++step) {
      sharded.step();
      single.step();
    }
    auto state = sharded.state(), expected = single.state();
    for (size_t i = 0; i < wholes.size(); ++i) {
      const auto& name = wholes[i].name;
      EXPECT_TRUE(at::equal(full_tensor(job.parameters[i].data), wholes[i].data.local.detach())) << name;
      for (const char* kept : {"exp_avg", "exp_avg_sq"}) {
        const DTensor& part = state.find(name)->second.at(kept);
        EXPECT_EQ(part.local.scalar_type(), at::kBFloat16);
        EXPECT_TRUE(at::equal(full_tensor(part), expected.find(name)->second.at(kept).local)) << name << kept;
      }
    }
  }
}

}  // namespace
}  // namespace titan
