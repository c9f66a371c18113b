#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "tensor/memory.h"
#include "titan/core/error.h"
#include "titan/nn/containers.h"
#include "titan/nn/layers.h"
#include "titan/parallel/parameters.h"
#include "unit/nn/residual_model.h"

namespace titan::nn {
namespace {

struct CountingHook : CallHook {
  void pre_forward(HookHost& /*host*/, const TensorRefs& /*inputs*/) override { ++count; }
  int count = 0;
};

TEST(ModuleList, NamesAndIteratesItsChildren) {
  ModuleList<Linear> list;
  for (int64_t i = 0; i < 3; ++i) list.push_back(Linear(i + 1, 2));
  int64_t i = 0;
  for (const Linear& linear : list) EXPECT_EQ(linear->weight.size(1), ++i);
  EXPECT_EQ(list.size(), 3u);
  EXPECT_EQ(list->named_parameters().keys(), (std::vector<std::string>{"0.weight", "1.weight", "2.weight"}));
}

TEST(ModuleList, KeepsGivenNames) {
  ModuleList<Linear> list;
  list.insert("7", Linear(1, 1));
  list.insert("8", Linear(1, 1));
  EXPECT_EQ(list->named_parameters().keys(), (std::vector<std::string>{"7.weight", "8.weight"}));
}

TEST(Sequential, CallsItsChildrenThroughTheirHolders) {
  Linear first(2, 3), second(3, 4);
  const auto hook = std::make_shared<CountingHook>();
  second->fsdp_hook = hook;
  Sequential both(first, second);
  const at::Tensor x = at::randn({5, 2});
  EXPECT_TRUE(both(x).equal(second(first(x))));
  EXPECT_EQ(hook->count, 2);
  EXPECT_EQ(both->parameters().size(), 2u);
}

using Strings = std::vector<std::string>;

Residual whole(const ResidualSizes& sizes = {}) { return Residual(sizes, deferred(at::kCPU)); }

Residual part_of(const ResidualSizes& sizes, const Strings& names) {
  Residual model = whole(sizes);
  model->keep_layers(names);
  return model;
}

Strings parameter_names(const Residual& model) {
  Strings names;
  for (const Parameter& parameter : parameters(model)) names.push_back(parameter.name);
  return names;
}

Strings problems_of(const Strings& names) {
  try {
    part_of({}, names);
  } catch (const ConfigError& error) {
    return error.problems();
  }
  return {};
}

TEST(LayerSequence, NamesItsModules) {
  const LayerSequence::Names names = whole({.num_layers = 3})->layer_names();
  EXPECT_EQ(names.before, Strings{"embedding"});
  EXPECT_EQ(names.layers, (Strings{"blocks.0", "blocks.1", "blocks.2"}));
  EXPECT_EQ(names.after, (Strings{"norm", "head"}));
}

TEST(LayerSequence, KeepsNamesInAPart) {
  const Residual model = part_of({}, {"blocks.2", "blocks.3"});
  EXPECT_EQ(parameter_names(model),
            (Strings{"blocks.2.up.weight", "blocks.2.up.bias", "blocks.2.down.weight", "blocks.3.up.weight",
                     "blocks.3.up.bias", "blocks.3.down.weight"}));
  EXPECT_EQ(model->layer_names().all(), (Strings{"blocks.2", "blocks.3"}));
  EXPECT_EQ(model->blocks.first_number(), 2);
  EXPECT_FALSE(model->embedding || model->norm || model->head);
  EXPECT_FALSE(model->is_first() || model->is_last() || model->is_whole());
  name_modules(*model.ptr());
  EXPECT_EQ(model->blocks[1]->down->fqn(), "blocks.3.down");
}

TEST(LayerSequence, KnowsFirstAndLastParts) {
  const Residual first = part_of({}, {"embedding"}), last = part_of({}, {"norm", "head"});
  EXPECT_TRUE(first->is_first() && !first->is_last() && first->blocks.empty());
  EXPECT_TRUE(last->is_last() && !last->is_first());
  const Residual all = part_of({}, whole()->layer_names().all());
  EXPECT_TRUE(all->is_whole() && all->dropped_modules().empty());
}

TEST(LayerSequence, RemembersDroppedModules) {
  const Residual model = part_of({.num_layers = 2}, {"embedding", "blocks.0", "blocks.1"});
  EXPECT_EQ(model->dropped_modules(), (Strings{"norm", "head"}));
  EXPECT_EQ(part_of({.num_layers = 2}, {"blocks.1", "norm", "head"})->dropped_modules(),
            (Strings{"embedding", "blocks.0", "blocks.0.up", "blocks.0.down"}));
}

TEST(LayerSequence, RefusesUnknownNamesAndGaps) {
  EXPECT_EQ(problems_of({}), Strings{"a stage must have a module"});
  EXPECT_EQ(problems_of({"blocks.5", "haed"}),
            (Strings{"the model calls no module 'blocks.5' in its sequence; did you mean 'blocks.0'?",
                     "the model calls no module 'haed' in its sequence; did you mean 'head'?"}));
  const Strings gap = problems_of({"blocks.1", "blocks.3"});
  ASSERT_EQ(gap.size(), 1u);
  EXPECT_NE(gap[0].find("aren't consecutive"), std::string::npos) << gap[0];
  EXPECT_EQ(problems_of({"head", "norm"}).size(), 1u);
  Residual model = part_of({}, {"embedding", "blocks.0"});
  EXPECT_THROW(model->keep_layers({"embedding"}), Error);
}

// Only kept modules get memory, with the whole model's values.
TEST(LayerSequence, InitializesAPartLikeTheWhole) {
  const Residual all = whole(), model = part_of({}, {"blocks.3", "blocks.4", "norm"});
  materialize(all, 7);
  materialize(model, 7);
  EXPECT_TRUE(model->blocks[0]->up->weight.equal(all->blocks[3]->up->weight));
  EXPECT_TRUE(model->blocks[1]->down->weight.equal(all->blocks[4]->down->weight));
  EXPECT_EQ(model->parameters().size(), 7u);
}

TEST(LayerSequence, KeepsTiedWeightsTiedByName) {
  const ResidualSizes sizes{.tied = true};
  const Residual all = whole(sizes);
  const auto shared = all->shared_parameters();
  ASSERT_EQ(shared.size(), 1u);
  EXPECT_EQ(shared[0].name, "embedding.weight");
  EXPECT_EQ(shared[0].modules, (Strings{"embedding", "head"}));

  const Residual first = part_of(sizes, {"embedding", "blocks.0"}), last = part_of(sizes, {"norm", "head"}),
                 middle = part_of(sizes, {"blocks.1"});
  EXPECT_TRUE(middle->shared_parameters().empty());
  for (const Residual& model : {all, first, last}) materialize(model, 7);
  EXPECT_EQ(parameter_names(last), (Strings{"norm.weight", "embedding.weight"}));
  EXPECT_TRUE(parameters(last).back().on_other_stages && parameters(first).front().on_other_stages);
  EXPECT_FALSE(parameters(last).front().on_other_stages || parameters(all).front().on_other_stages);
  EXPECT_TRUE(first->embedding->weight.equal(all->embedding->weight));
  EXPECT_TRUE(last->head->weight.equal(all->embedding->weight));
  EXPECT_FALSE(last->head->weight.is_same(first->embedding->weight));
}

TEST(LayerSequence, SharesNothingWhenOneStageHasBothEnds) {
  const ResidualSizes sizes{.num_layers = 1, .tied = true};
  const Residual model = part_of(sizes, whole(sizes)->layer_names().all());
  EXPECT_FALSE(parameters(model).front().on_other_stages);
}

class StackImpl : public Module, public LayerSequence {
 public:
  StackImpl() : steps(Linear(4, 4), Linear(4, 4), Linear(4, 4)) {
    register_module("steps", steps);
    call_in_order({part("steps", steps)});
  }
  at::Tensor forward(const at::Tensor& x) { return steps(x); }
  Sequential steps;
};
TITAN_MODULE(Stack);

TEST(LayerSequence, SplitsASequential) {
  Stack stack;
  const at::Tensor x = at::randn({2, 4});
  const at::Tensor expected = stack->steps->named_children()["2"]->as<LinearImpl>()->forward(
      stack->steps->named_children()["1"]->as<LinearImpl>()->forward(x));
  stack->keep_layers({"steps.1", "steps.2"});
  EXPECT_TRUE(stack(x).equal(expected));
  EXPECT_TRUE(stack->is_last() && !stack->is_first());
}

// Run one after the other, the parts compute the same bits as the whole.
TEST(LayerSequence, ConsecutivePartsEqualTheWhole) {
  for (const bool tied : {false, true}) {
    const ResidualSizes sizes{.tied = tied};
    const Construct doubles = deferred(at::kCPU, at::kDouble);
    const Residual all(sizes, doubles);
    std::vector<Residual> parts;
    for (const Strings& names : {Strings{"embedding"}, Strings{"blocks.0", "blocks.1"}, Strings{"blocks.2"},
                                 Strings{"blocks.3", "blocks.4", "norm"}, Strings{"head"}}) {
      parts.emplace_back(sizes, doubles);
      parts.back()->keep_layers(names);
      materialize(parts.back(), 7);
    }
    materialize(all, 7);
    const at::Tensor tokens = at::randint(20, {3, 4}), labels = at::randint(20, {3, 4});
    const at::Tensor expected = all(tokens, labels, 12);
    expected.backward();

    std::vector<at::Tensor> inputs = {tokens}, outputs;
    for (size_t i = 0; i + 1 < parts.size(); ++i) {
      outputs.push_back(parts[i](inputs.back()));
      inputs.push_back(outputs.back().detach().requires_grad_());
    }
    const at::Tensor loss = parts.back()(inputs.back(), labels, 12);
    EXPECT_TRUE(loss.equal(expected));
    loss.backward();
    for (size_t i = outputs.size(); i-- > 0;) outputs[i].backward(inputs[i + 1].grad());

    std::map<std::string, at::Tensor> gradients;
    for (const Residual& part : parts)
      for (const Parameter& parameter : parameters(part)) {
        at::Tensor& sum = gradients[parameter.name];
        sum = sum.defined() ? sum + parameter.compute.grad() : parameter.compute.grad();
      }
    const auto list = parameters(all);
    ASSERT_EQ(gradients.size(), list.size());
    for (const Parameter& parameter : list)
      EXPECT_LE((gradients.at(parameter.name) - parameter.compute.grad()).norm().item<double>(),
                1e-12 * parameter.compute.grad().norm().item<double>())
          << parameter.name;
  }
}

}  // namespace
}  // namespace titan::nn
