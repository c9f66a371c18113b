// Llama 3 cut into pipeline stages computes the same as the whole model.

#include <map>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "parallel/pipeline/split.h"
#include "titan/core/error.h"
#include "titan/models/llama3.h"
#include "titan/parallel/activation_checkpoint.h"
#include "titan/parallel/parameters.h"
#include "unit/models/small_llama.h"

namespace titan::models {
namespace {

pipeline::ModuleSequence sequence_of(const Llama3& model) {
  const auto names = model->layer_names();
  return {names.before, names.layers, names.after};
}

struct Case {
  bool tied = false;
  int num_stages = 2;
  bool checkpoint = false;
};

std::vector<Llama3> build_stages(const Case& wanted) {
  const Construct doubles = deferred(at::kCPU, at::kDouble);
  std::vector<Llama3> stages;
  for (const auto& modules :
       pipeline::split_evenly(sequence_of(Llama3(small_llama(wanted.tied, 6), doubles)), wanted.num_stages)) {
    Llama3& stage = stages.emplace_back(small_llama(wanted.tied, 6), doubles);
    stage->keep_layers(modules);
    if (wanted.checkpoint)
      for (const TransformerBlock& layer : stage->layers) checkpoint_activations(layer, FullRecompute{});
    materialize(stage, 5);
  }
  return stages;
}

// Runs forward and backward through the stages, each with its own graph. Returns gradients by name, summed
// over stages that share a parameter.
std::map<std::string, at::Tensor> run(const std::vector<Llama3>& stages, const at::Tensor& tokens,
                                      const at::Tensor& labels, at::Tensor& loss) {
  std::vector<at::Tensor> inputs = {tokens}, outputs;
  for (size_t i = 0; i + 1 < stages.size(); ++i) {
    outputs.push_back(stages[i](inputs.back()));
    inputs.push_back(outputs.back().detach().requires_grad_());
  }
  loss = stages.back()(inputs.back(), labels, labels.numel());
  loss.backward();
  for (size_t i = outputs.size(); i-- > 0;) outputs[i].backward(inputs[i + 1].grad());
  std::map<std::string, at::Tensor> gradients;
  for (const Llama3& stage : stages)
    for (const Parameter& parameter : parameters(stage)) {
      at::Tensor& sum = gradients[parameter.name];
      sum = sum.defined() ? sum + parameter.compute.grad() : parameter.compute.grad();
    }
  return gradients;
}

class Llama3Stages : public ::testing::TestWithParam<Case> {};

TEST_P(Llama3Stages, EqualTheWholeModel) {
  const Llama3 whole(small_llama(GetParam().tied, 6), deferred(at::kCPU, at::kDouble));
  materialize(whole, 5);
  const at::Tensor tokens = at::randint(50, {2, 16}), labels = at::randint(50, {2, 16});
  at::Tensor expected_loss, loss;
  const auto expected = run({whole}, tokens, labels, expected_loss);
  const auto gradients = run(build_stages(GetParam()), tokens, labels, loss);
  EXPECT_TRUE(loss.equal(expected_loss));
  ASSERT_EQ(gradients.size(), expected.size());
  for (const auto& [name, gradient] : expected)
    EXPECT_LE((gradients.at(name) - gradient).norm().item<double>(), 1e-12 * gradient.norm().item<double>())
        << name;
}

// With 6 layers in 8 stages, the first and the last stage have no layer.
INSTANTIATE_TEST_SUITE_P(All, Llama3Stages,
                         ::testing::Values(Case{false, 2, false}, Case{false, 3, true}, Case{false, 8, false},
                                           Case{true, 2, false}, Case{true, 8, true}),
                         [](const auto& info) {
                           return str(info.param.num_stages, "stages", info.param.tied ? "Tied" : "",
                                      info.param.checkpoint ? "Checkpointed" : "");
                         });

TEST(Llama3Stage, HasOnlyItsOwnParameters) {
  std::vector<std::string> names;
  for (const Llama3& stage : build_stages({.num_stages = 8}))
    for (const Parameter& parameter : parameters(stage)) names.push_back(parameter.name);
  std::vector<std::string> expected;
  for (const Parameter& parameter : parameters(Llama3(small_llama(false, 6), deferred(at::kMeta))))
    expected.push_back(parameter.name);
  EXPECT_EQ(names, expected);
}

TEST(Llama3Stage, HasARotaryTableIfItHasLayers) {
  const auto stages = build_stages({.num_stages = 8});
  EXPECT_FALSE(stages.front()->rotary);
  EXPECT_FALSE(stages.back()->rotary);
  EXPECT_TRUE(stages[1]->rotary);
}

TEST(Llama3Stage, OnlyTheLastOneHasALoss) {
  const auto stages = build_stages({.num_stages = 2});
  const at::Tensor tokens = at::zeros({1, 16}, at::kLong);
  EXPECT_THROW(stages[0](tokens, tokens, 16), Error);
  const at::Tensor hidden = stages[0](tokens);
  EXPECT_EQ(hidden.sizes(), at::IntArrayRef({1, 16, 32}));
  EXPECT_EQ(stages[1](hidden).sizes(), at::IntArrayRef({1, 16, 50}));
}

}  // namespace
}  // namespace titan::models
