#include "titan/nn/hooks.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include "nn/constructed_modules.h"
#include "titan/core/error.h"
#include "titan/nn/containers.h"
#include "titan/nn/layers.h"

namespace titan::nn {
namespace {

using Log = std::vector<std::string>;

struct LoggingHook : CallHook {
  LoggingHook(Log& log, std::string name) : log(log), name(std::move(name)) {}
  void pre_forward(HookHost& /*host*/, const TensorRefs& /*inputs*/) override {
    log.push_back(name + " pre");
  }
  void post_forward(HookHost& /*host*/, const TensorRefs& /*outputs*/) override {
    log.push_back(name + " post");
  }
  Log& log;
  std::string name;
};

// Runs the module twice, like a checkpoint that recomputes in its backward.
struct RunTwice : CheckpointHook {
  explicit RunTwice(Log& log) : log(log) {}
  TensorList call(HookHost& /*host*/, const TensorList& inputs, Run run) override {
    log.push_back("checkpoint");
    run(inputs);
    log.push_back("recompute");
    return run(inputs);
  }
  Log& log;
};

struct DoublingHook : CallHook {
  void pre_forward(HookHost& /*host*/, const TensorRefs& inputs) override {
    for (at::Tensor* input : inputs) *input = *input * 2;
  }
  void post_forward(HookHost& /*host*/, const TensorRefs& outputs) override {
    for (at::Tensor* output : outputs) *output = *output + 1;
  }
};

class AddImpl : public Module {
 public:
  at::Tensor forward(const at::Tensor& a, const std::optional<at::Tensor>& b = std::nullopt) {
    check_entered_through_ref();
    return b ? a + *b : a;
  }
};
TITAN_MODULE(Add);

TEST(Hooks, RunInSlotOrder) {
  Log log;
  Add add;
  add->prepare_output_hook = std::make_shared<LoggingHook>(log, "output");
  add->label_hook = std::make_shared<LoggingHook>(log, "label");
  add->checkpoint_hook = std::make_shared<RunTwice>(log);
  add->fsdp_hook = std::make_shared<LoggingHook>(log, "fsdp");
  add->prepare_input_hook = std::make_shared<LoggingHook>(log, "input");
  add(at::ones({1}));
  EXPECT_EQ(log, (Log{"fsdp pre", "label pre", "checkpoint", "input pre", "output post", "recompute",
                      "input pre", "output post", "label post", "fsdp post"}));
}

TEST(Hooks, MayReplaceInputsAndOutputs) {
  Add add;
  add->fsdp_hook = std::make_shared<DoublingHook>();
  EXPECT_EQ(add(at::ones({1}), std::optional(at::ones({1}))).item<double>(), 5);
  EXPECT_EQ(add(at::ones({1})).item<double>(), 3);
}

TEST(Hooks, WrappedModulesMustBeCalledThroughTheirHolder) {
  Add add;
  EXPECT_EQ(add->forward(at::ones({1})).item<double>(), 1);
  add->set_fqn("layers.2.add");
  add->fsdp_hook = std::make_shared<DoublingHook>();
  try {
    add->forward(at::ones({1}));
    FAIL() << "expected an error";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("layers.2.add"), std::string::npos) << error.what();
  }
}

TEST(Hooks, ModuleStaysUsableAfterAnErrorInForward) {
  Add add;
  add->label_hook = std::make_shared<DoublingHook>();
  EXPECT_ANY_THROW(add(at::ones({2}), std::optional(at::ones({3}))));
  add->fsdp_hook = std::make_shared<DoublingHook>();
  EXPECT_THROW(add->forward(at::ones({1})), Error);
  EXPECT_NO_THROW(add(at::ones({1})));
}

TEST(Hooks, RefuseToMoveOrCloneAWrappedModule) {
  Linear linear(2, 3);
  EXPECT_NO_THROW(linear->to(at::kDouble));
  linear->fsdp_hook = std::make_shared<DoublingHook>();
  EXPECT_THROW(linear->to(at::kFloat), Error);
  EXPECT_THROW(linear->to(torch::Device(at::kCPU)), Error);
  EXPECT_THROW(linear->clone(), Error);
  Sequential around(linear);
  EXPECT_THROW(around->to(at::kFloat), Error);
}

TEST(Hooks, RefuseToMoveADeferredModule) {
  Linear linear(2, 3, LinearOptions{.construct = deferred(at::kCPU)});
  EXPECT_THROW(linear->to(at::kDouble), Error);
}

TEST(Hooks, WorkOnLibTorchsModules) {
  using HookedLinear = Ref<Hooked<torch::nn::LinearImpl>>;
  HookedLinear linear(std::make_shared<Hooked<torch::nn::LinearImpl>>(torch::nn::LinearOptions(2, 2)));
  const at::Tensor x = at::randn({3, 2});
  const at::Tensor expected = at::linear(x * 2, linear->weight, linear->bias) + 1;
  linear->fsdp_hook = std::make_shared<DoublingHook>();
  EXPECT_TRUE(linear(x).equal(expected));
  EXPECT_THROW(linear->forward(x), Error);
  EXPECT_THROW(linear->to(at::kDouble), Error);
}

TEST(Hooks, NameModulesGivesDottedNames) {
  Sequential inner(Linear(2, 2), Linear(2, 2));
  Sequential root(inner, Linear(2, 2));  // with one argument it would be another holder of `inner`
  name_modules(*root);
  EXPECT_EQ(inner->fqn(), "0");
  EXPECT_EQ(dynamic_cast<HookHost&>(*inner->children()[1]).fqn(), "0.1");
  EXPECT_EQ(root->fqn(), "");
}

// Holds two modules, of which it registers `up`, and the other on request.
class PairImpl : public Module {
 public:
  explicit PairImpl(bool registers_both) : up(2, 3), down(3, 2) {
    register_module("up", up);
    if (registers_both) register_module("down", down);
  }
  Linear up, down;
};
TITAN_MODULE(Pair);

TEST(ConstructedModules, NamesThoseThatArentRegistered) {
  const ConstructedModules constructed;
  Pair whole(true);
  EXPECT_EQ(constructed.unregistered(*whole), Log{});
  const ConstructedModules since;
  Pair partial(false);
  EXPECT_EQ(since.unregistered(*partial),
            (Log{"titan::nn::LinearImpl with weight [2, 3], constructed after 'up'"}));
}

TEST(ConstructedModules, ReportAModuleWithoutThoseBelowIt) {
  const ConstructedModules constructed;
  Linear root(2, 2);
  Pair elsewhere(true);
  EXPECT_EQ(constructed.unregistered(*root), (Log{"titan::nn::(anonymous namespace)::PairImpl with up.weight "
                                                  "[3, 2], down.weight [2, 3], constructed after the root "
                                                  "module"}));
}

TEST(ConstructedModules, IgnoreDestroyedFrozenAndTiedOnes) {
  const ConstructedModules constructed;
  Linear root(2, 2);
  { Linear gone(2, 2); }
  Linear frozen(2, 2);
  frozen->weight.requires_grad_(false);
  Add tied;
  tied->register_parameter("weight", root->weight);
  EXPECT_EQ(constructed.unregistered(*root), Log{});
}

}  // namespace
}  // namespace titan::nn
