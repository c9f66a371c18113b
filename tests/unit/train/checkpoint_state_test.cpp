// The states that a run's objects save, and how they load them.

#include "titan/train/checkpoint_state.h"

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "titan/dist/world.h"
#include "titan/nn/layers.h"
#include "train/checkpoints/checkpoint_settings.h"

namespace titan::train {
namespace {

std::vector<Parameter> two_parameters(nn::Linear& up, nn::Linear& down) {
  std::vector<Parameter> list;
  for (auto& [prefix, layer] : {std::pair("up.", up), std::pair("down.", down)})
    for (Parameter parameter : parameters(layer)) {
      parameter.name = prefix + parameter.name;
      list.push_back(parameter);
    }
  return list;
}

struct Layers {
  nn::Linear up{4, 6}, down{6, 2};
  std::vector<Parameter> list = two_parameters(up, down);
};

std::vector<std::string> names_of(const checkpoint::ObjectState& state) {
  std::vector<std::string> names;
  for (const auto& tensor : state.tensors) names.push_back(tensor.name);
  return names;
}

TEST(CheckpointState, ModelsShareTheirParameters) {
  Layers layers;
  layers.list[1].duplicate = true;
  ModelState model(layers.list);
  const checkpoint::ObjectState state = model.state();
  EXPECT_EQ(names_of(state), (std::vector<std::string>{"up.weight", "down.weight"}));
  EXPECT_FALSE(state.tensors[0].duplicate);
  EXPECT_TRUE(state.tensors[1].duplicate);
  EXPECT_FALSE(state.tensors[0].data.local.requires_grad());
  at::Tensor target = state.tensors[0].data.local;
  EXPECT_EQ(target.data_ptr(), layers.list[0].data.local.data_ptr());
  // Bytes that arrive without autograd still change the version.
  const auto version = layers.list[0].data.local._version();
  model.loaded("");
  EXPECT_GT(layers.list[0].data.local._version(), version);
}

TEST(CheckpointState, OptimizersCanBeLoadedBeforeTheirFirstStep) {
  Layers layers;
  layers.list[0].duplicate = true;
  optim::Optimizer optimizer(layers.list, {.lr = 0.1});
  OptimizerState object(optimizer, layers.list);
  const checkpoint::ObjectState state = object.state();
  EXPECT_EQ(names_of(state),
            (std::vector<std::string>{"down.weight.exp_avg", "down.weight.exp_avg_sq", "down.weight.step",
                                      "up.weight.exp_avg", "up.weight.exp_avg_sq", "up.weight.step"}));
  for (const auto& tensor : state.tensors) EXPECT_EQ(tensor.duplicate, tensor.name[0] == 'u') << tensor.name;
  at::Tensor step = state.tensors[2].data.local;
  step.fill_(41);
  layers.list[1].data.local.mutable_grad() = at::ones_like(layers.list[1].data.local);
  optimizer.step();
  EXPECT_EQ(step.item<float>(), 42);
}

TEST(CheckpointState, GeneratorsResume) {
  const dist::World world = dist::init({.backend = "fake"});
  const Meshes meshes = build_meshes(world, {});
  RngState rng(meshes, at::kCPU, 3);
  EXPECT_EQ(rng.place(), "pp 1, dp_replicate 1, dp_shard 1, cp 1, tp 1, cpu");
  at::manual_seed(5);
  at::rand({7});
  checkpoint::ObjectState saved = rng.state();
  ASSERT_EQ(names_of(saved), (std::vector<std::string>{"pp0.cpu"}));
  EXPECT_EQ(saved.text, rng.place());
  const at::Tensor bytes = saved.tensors[0].data.local.clone(), next = at::rand({9});
  at::Tensor target = rng.state().tensors[0].data.local;
  target.copy_(bytes);
  rng.loaded(saved.text);
  EXPECT_TRUE(at::equal(at::rand({9}), next));
}

TEST(CheckpointState, ReseededGeneratorsDifferForEachSeedAndStep) {
  const dist::World world = dist::init({.backend = "fake"});
  const Meshes meshes = build_meshes(world, {});
  std::vector<at::Tensor> drawn;
  for (const uint64_t seed : {0, 1})
    for (const int64_t step : {0, 1, 500}) {
      RngState(meshes, at::kCPU, seed).reseed(step);
      drawn.push_back(at::rand({4}));
    }
  for (size_t i = 0; i < drawn.size(); ++i)
    for (size_t j = 0; j < i; ++j) EXPECT_FALSE(at::equal(drawn[i], drawn[j])) << i << " " << j;
  RngState(meshes, at::kCPU, 1).reseed(500);
  EXPECT_TRUE(at::equal(at::rand({4}), drawn.back()));
}

TEST(CheckpointSettings, ReportsInvalidExclusions) {
  EXPECT_TRUE(exclusion_problems({"rng", "lr_scheduler", "dataloader"}).empty());
  EXPECT_TRUE(exclusion_problems({"optimizer", "lr_scheduler"}).empty());
  EXPECT_EQ(exclusion_problems({"model", "optimizer"}).size(), 2u);
  EXPECT_TRUE(unknown_exclusions({"rng"}, {"model", "rng"}).empty());
  EXPECT_EQ(unknown_exclusions({"rgn"}, {"model", "rng"}),
            (std::vector<std::string>{"'rgn' isn't saved; known: model, rng; did you mean 'rng'?"}));
}

}  // namespace
}  // namespace titan::train
