// Forwards that checkpointed modules may have, and errors for those that they may not have.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <optional>
#include <string>

#include "titan/core/error.h"
#include "titan/nn/layers.h"
#include "titan/parallel/activation_checkpoint.h"
#include "unit/parallel/checkpoint_case.h"
#include "unit/parallel/lambda_module.h"

namespace titan {
namespace {

using namespace testing;

at::Tensor two_layers(LambdaImpl& self, const at::Tensor& x) {
  ++self.calls;
  return at::linear(at::tanh(at::linear(x, self.weight) * self.frozen), self.weight).exp();
}

TEST(Modules, CanUseLibTorchsOperations) {
  const Gradients expected = gradients_of(Lambda(two_layers));
  const Lambda module = checkpointed(two_layers);
  const Gradients got = gradients_of(module);
  EXPECT_TRUE(got.x.equal(expected.x));
  EXPECT_TRUE(got.weight.equal(expected.weight));
  EXPECT_EQ(module->calls, 2);
}

TEST(Modules, CanHaveInputsWithoutGradient) {
  const Gradients expected = gradients_of(Lambda(two_layers), false);
  const Gradients got = gradients_of(checkpointed(two_layers), false);
  EXPECT_FALSE(got.x.defined());
  EXPECT_TRUE(got.weight.equal(expected.weight));
}

TEST(Modules, CanBeCalledTwiceInOneForward) {
  const Gradients expected = gradients_of(Lambda(two_layers), true, 2);
  const Lambda module = checkpointed(two_layers);
  const Gradients got = gradients_of(module, true, 2);
  EXPECT_TRUE(got.x.equal(expected.x));
  EXPECT_TRUE(got.weight.equal(expected.weight));
  EXPECT_EQ(module->calls, 4);
}

TEST(Modules, RunOnceAndSaveNothingWithoutGradients) {
  const Lambda module = checkpointed(two_layers);
  const at::NoGradGuard no_grad;
  MemoryMeter meter;
  const at::Tensor y = module(at::ones({3, 4}));
  EXPECT_EQ(module->calls, 1);
  EXPECT_FALSE(y.requires_grad());
  EXPECT_EQ(meter.bytes(), static_cast<int64_t>(y.nbytes()));
}

TEST(Modules, SupportTwoBackwardsThroughOneGraph) {
  const Lambda module = checkpointed(two_layers);
  const at::Tensor x = at::ones({3, 4}).requires_grad_();
  const at::Tensor y = module(x).sum();
  y.backward({}, /*retain_graph=*/true);
  const at::Tensor once = x.grad().clone();
  y.backward();
  EXPECT_TRUE(x.grad().equal(once * 2));
  EXPECT_EQ(module->calls, 3);
}

TEST(Modules, SupportABackwardOfTheInputAlone) {
  const Lambda module = checkpointed(two_layers);
  const Gradients expected = gradients_of(Lambda(two_layers));
  const at::Tensor x = at::linspace(-1, 1, 12).view({3, 4}).requires_grad_();
  const at::Tensor y = module(x).sum();
  EXPECT_TRUE(torch::autograd::grad({y}, {x}, {}, /*retain_graph=*/true)[0].equal(expected.x));
  // The parameter's value changes, so tensors of the first backward must not be reused.
  module->weight.data().mul_(0.5);
  const Lambda halved(two_layers);
  halved->weight.data().mul_(0.5);
  const Gradients of_halved = gradients_of(halved);
  EXPECT_FALSE(of_halved.x.equal(expected.x));
  EXPECT_TRUE(torch::autograd::grad({y}, {x})[0].equal(of_halved.x));
}

TEST(Modules, CanRunABackwardInTheirForward) {
  const auto body = [](LambdaImpl& self, const at::Tensor& x) {
    const at::Tensor inner = x.detach().requires_grad_();
    const at::Tensor slope = torch::autograd::grad({at::tanh(inner).sum()}, {inner})[0];
    return at::linear(x * slope, self.weight).exp();
  };
  const Gradients expected = gradients_of(Lambda(body));
  const Gradients got = gradients_of(checkpointed(body));
  EXPECT_TRUE(got.x.equal(expected.x));
  EXPECT_TRUE(got.weight.equal(expected.weight));
}

// A force computed from an energy: the recompute ends inside the module's own backward.
TEST(Modules, CanReturnAGradient) {
  const auto force = [](LambdaImpl& self, const at::Tensor& x) {
    const at::Tensor energy = at::linear(x, self.weight).tanh().pow(2).sum();
    return torch::autograd::grad({energy}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0].exp();
  };
  const Gradients expected = gradients_of(Lambda(force));
  for (const bool early_stop : {true, false}) {
    const Gradients got = gradients_of(checkpointed(force, {.early_stop = early_stop}));
    EXPECT_TRUE(got.x.equal(expected.x)) << early_stop;
    EXPECT_TRUE(got.weight.equal(expected.weight)) << early_stop;
  }
}

// The module mistakes the end of its recompute for a failure and takes another path.
TEST(Modules, CanCatchExceptions) {
  const auto catching = [](LambdaImpl& self, const at::Tensor& x) {
    const at::Tensor y = at::linear(x, self.weight);
    try {
      return y.exp();
    } catch (const std::exception&) {
      return at::linear(y.sin(), self.weight);
    }
  };
  const Gradients expected = gradients_of(Lambda(catching));
  const Gradients got = gradients_of(checkpointed(catching));
  EXPECT_TRUE(got.x.equal(expected.x));
  EXPECT_TRUE(got.weight.equal(expected.weight));
}

// Only the module owns the node of the tensor that it keeps, so the node dies during the recompute.
at::Tensor keeping_a_norm(LambdaImpl& self, const at::Tensor& x) {
  const at::Tensor y = at::linear(x, self.weight).exp();
  self.kept = y.norm();
  return at::linear(y, self.weight).exp();
}

TEST(Modules, CanKeepATensorWithItsGraph) {
  const Gradients expected = gradients_of(Lambda(keeping_a_norm));
  MemoryMeter meter;  // measures allocations from now on
  Lambda module = checkpointed(keeping_a_norm);
  const Gradients got = gradients_of(module);
  EXPECT_TRUE(got.x.equal(expected.x));
  EXPECT_TRUE(got.weight.equal(expected.weight));
  // The graph is now that of the recompute, which kept only its own input.
  EXPECT_NE(
      message_of([&] { module->kept.backward(); }).find("detach() tensors that a checkpointed module keeps"),
      std::string::npos);
  const int64_t scalar = 4, input = 3 * 4 * 4, before = meter.bytes();
  module->kept.reset();
  EXPECT_GE(meter.bytes(), before - (scalar + input));
}

// Has products a, b and c, where a and c are kept. Between them it computes a slope by a backward.
class SlopedImpl : public nn::Module {
 public:
  SlopedImpl() {
    for (nn::Linear* linear : {&a, &b, &c}) {
      *linear = nn::Linear(4, 4);
      for (const at::Tensor& parameter : (*linear)->parameters())
        parameter.variable_data().copy_(at::linspace(-1, 1, parameter.numel()).view(parameter.sizes()));
    }
    register_module("a", a);
    register_module("b", b);
    register_module("c", c);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor inner = x.detach().requires_grad_();
    const at::Tensor sum = at::tanh(inner).sum();
    const at::Tensor y = a(x);
    const at::Tensor slope = torch::autograd::grad({sum}, {inner})[0];
    return c(b(y * slope).tanh()).exp();
  }
  nn::Linear a{nullptr}, b{nullptr}, c{nullptr};
};
TITAN_MODULE(Sloped);

TEST(Modules, CanRunABackwardBetweenKeptProducts) {
  const auto run = [](const std::optional<ModulePolicy>& policy, bool early_stop) {
    Sloped module;
    if (policy) checkpoint_activations(module, *policy, {.early_stop = early_stop});
    const at::Tensor x = at::linspace(-1, 1, 12).view({3, 4}).requires_grad_();
    const at::Tensor y = module(x);
    y.sum().backward();
    return std::vector{y, x.grad(), module->a->weight.grad(), module->c->weight.grad()};
  };
  const auto expected = run(std::nullopt, true);
  for (const ModulePolicy& policy : {ModulePolicy(FullRecompute{}), ModulePolicy(SelectiveOp{})}) {
    for (const bool early_stop : {true, false}) {
      const auto got = run(policy, early_stop);
      for (size_t i = 0; i < expected.size(); ++i)
        EXPECT_TRUE(got[i].equal(expected[i])) << policy.index() << early_stop << i;
    }
  }
}

// Two tensors, one of them optional, and numbers; two results.
class ManyImpl : public nn::Module {
 public:
  ManyImpl() { weight = register_parameter("weight", at::linspace(-1, 1, 4)); }
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& a, const std::optional<at::Tensor>& b,
                                             const at::Tensor& index, double factor) {
    const at::Tensor sum = (b ? a * *b : a).exp() * weight * factor;
    return {sum.tanh(), sum.index_select(0, index).exp()};
  }
  at::Tensor weight;
};
TITAN_MODULE(Many);

TEST(Modules, CanHaveSeveralInputsAndOutputs) {
  const auto run = [](bool checkpoint, bool both) {
    Many module;
    if (checkpoint) checkpoint_activations(module, FullRecompute{});
    const at::Tensor a = at::linspace(0, 1, 8).view({2, 4}).requires_grad_();
    const at::Tensor b = at::linspace(1, 2, 8).view({2, 4}).requires_grad_();
    const auto [first, second] =
        module(a, both ? std::optional(b) : std::nullopt, at::tensor({1, 0, 1}), 0.25);
    (first.sum() + second.pow(2).sum()).backward();
    return std::vector{a.grad(), both ? b.grad() : a.grad(), module->weight.grad()};
  };
  for (const bool both : {true, false}) {
    const auto expected = run(false, both), got = run(true, both);
    for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(got[i].equal(expected[i])) << both << i;
  }
}

TEST(Modules, CanHaveUnusedOutputs) {
  Many module;
  checkpoint_activations(module, FullRecompute{});
  const at::Tensor a = at::linspace(0, 1, 8).view({2, 4}).requires_grad_();
  {
    const auto [first, second] = module(a, std::nullopt, at::tensor({1, 0, 1}), 0.25);
    first.sum().backward();  // the nodes of `second` die without unpacking
  }
  Many plain;
  const at::Tensor b = at::linspace(0, 1, 8).view({2, 4}).requires_grad_();
  std::get<0>(plain(b, std::nullopt, at::tensor({1, 0, 1}), 0.25)).sum().backward();
  EXPECT_TRUE(a.grad().equal(b.grad()));
}

// ---- random numbers

at::Tensor with_dropout(LambdaImpl& self, const at::Tensor& x) {
  return at::dropout(at::linear(x, self.weight), 0.5, /*train=*/true).exp() * at::rand_like(x);
}

TEST(RandomNumbers, RepeatInTheRecompute) {
  at::manual_seed(3);
  const Gradients expected = gradients_of(Lambda(with_dropout));
  const at::Tensor next = at::rand({4});
  at::manual_seed(3);
  const Gradients got = gradients_of(checkpointed(with_dropout));
  EXPECT_TRUE(got.x.equal(expected.x));
  EXPECT_TRUE(got.weight.equal(expected.weight));
  EXPECT_TRUE(at::rand({4}).equal(next)) << "the recompute leaves the generator where it was";
}

TEST(RandomNumbers, DifferWithoutTheSavedState) {
  at::manual_seed(3);
  const Gradients expected = gradients_of(Lambda(with_dropout));
  at::manual_seed(3);
  const Gradients got = gradients_of(checkpointed(with_dropout, {.preserve_rng_state = false}));
  EXPECT_FALSE(got.x.equal(expected.x));
}

// ---- errors

TEST(Errors, InARecomputePropagateOutOfTheBackward) {
  const Lambda module = checkpointed([](LambdaImpl& self, const at::Tensor& x) {
    const at::Tensor noise = at::rand({1});
    if (++self.calls == 2) throw std::runtime_error("the second run fails");
    return at::linear(x, self.weight).exp() + noise;
  });
  const at::Tensor x = at::ones({3, 4}).requires_grad_();
  const at::Tensor y = module(x).sum();
  const at::Tensor before = at::rand({1});
  at::manual_seed(5);
  const at::Tensor expected = at::rand({1});
  at::manual_seed(5);
  EXPECT_NE(message_of([&] { y.backward({}, /*retain_graph=*/true); }).find("the second run fails"),
            std::string::npos);
  EXPECT_TRUE(at::rand({1}).equal(expected)) << "the generator is where it was";
  EXPECT_TRUE(at::GradMode::is_enabled());
  y.backward();  // the third run doesn't
  EXPECT_TRUE(x.grad().defined());
  // The checkpoint leaves no state on this thread.
  MemoryMeter meter;
  { const at::Tensor z = at::ones({4}).requires_grad_().exp(); }
  EXPECT_EQ(meter.bytes(), 0);
}

TEST(Errors, NameTheModuleThatTakesAnotherPath) {
  const auto shrinking = [](LambdaImpl& self, const at::Tensor& x) {
    return at::linear(x.narrow(0, self.calls++ > 0 ? 1 : 0, 2), self.weight.narrow(0, 0, 4 - self.calls))
        .exp();
  };
  const auto backward_of = [](const Lambda& module) {
    return message_of([&] { module(at::ones({3, 4}).requires_grad_()).sum().backward(); });
  };
  EXPECT_NE(backward_of(checkpointed(shrinking)).find("recomputing 'layers.7' saved a Float tensor"),
            std::string::npos);
  const auto shorter = [](LambdaImpl& self, const at::Tensor& x) {
    return self.calls++ > 0 ? at::linear(x, self.weight) : at::linear(x, self.weight).exp().exp();
  };
  EXPECT_NE(backward_of(checkpointed(shorter)).find("the same path twice"), std::string::npos);
}

TEST(Errors, NameTheModuleThatSavesMore) {
  const auto longer = [](LambdaImpl& self, const at::Tensor& x) {
    const at::Tensor y = at::linear(x, self.weight).exp();
    return self.calls++ > 0 ? y.exp() : y;
  };
  const auto backward_of = [&](const ActivationCheckpointOptions& options) {
    return message_of([&] { gradients_of(checkpointed(longer, options)); });
  };
  EXPECT_NE(backward_of({.early_stop = false}).find("the same path twice"), std::string::npos);
  EXPECT_EQ(backward_of({.early_stop = true}), "no error") << "it stops before";
  EXPECT_EQ(backward_of({.early_stop = false, .check_recompute = false}), "no error");
}

TEST(Errors, AreLibTorchsOwnWithoutTheShapeCheck) {
  const auto shrinking = [](LambdaImpl& self, const at::Tensor& x) {
    return at::linear(x.narrow(0, 0, self.calls++ > 0 ? 2 : 3), self.weight).exp();
  };
  const auto backward_of = [&](bool check) {
    return message_of([&] { gradients_of(checkpointed(shrinking, {.check_recompute = check})); });
  };
  EXPECT_NE(backward_of(true).find("recomputing 'layers.7' saved a Float tensor"), std::string::npos);
  EXPECT_EQ(backward_of(false).find("recomputing"), std::string::npos);
}

TEST(Errors, ReportProductsInAnotherOrder) {
  class TurningImpl : public nn::Module {
   public:
    TurningImpl() {
      for (const char* name : {"a", "b", "c"}) linears.push_back(register_module(name, nn::Linear(4, 4)));
    }
    at::Tensor forward(at::Tensor x) {
      for (const nn::Linear& linear : linears) x = linear(x).tanh();
      std::reverse(linears.begin(), linears.end());
      return x;
    }
    std::vector<nn::Linear> linears;
  };
  nn::Ref<TurningImpl> module(std::make_shared<TurningImpl>());
  module->set_fqn("layers.7");
  checkpoint_activations(module, SelectiveOp{});
  const at::Tensor y = module(at::ones({2, 4}).requires_grad_()).sum();
  EXPECT_NE(message_of([&] { y.backward(); }).find("recomputing 'layers.7' ran its products"),
            std::string::npos);
}

// LibTorch doesn't check saved tensors if hooks pack them.
TEST(Errors, ReportWritesToSavedTensors) {
  const auto body = [](LambdaImpl& self, const at::Tensor& x) {
    const at::Tensor y = at::linear(x, self.weight).exp();
    return at::linear(y.mul_(2).sin(), self.weight);
  };
  EXPECT_NE(message_of([&] { gradients_of(Lambda(body)); }).find("modified by an inplace operation"),
            std::string::npos);
  for (const bool early_stop : {true, false})
    EXPECT_NE(message_of([&] {
                gradients_of(checkpointed(body, {.early_stop = early_stop}));
              }).find("'layers.7' saves for its backward, Float [3, 4], was modified in place"),
              std::string::npos);
}

TEST(Errors, ReportWritesToInputs) {
  const at::Tensor x = at::ones({3, 4}).requires_grad_();
  const Lambda writing = checkpointed(
      [](LambdaImpl& self, const at::Tensor& input) { return at::linear(input.mul_(2), self.weight).exp(); });
  const auto message = [&] { return message_of([&] { writing(x * 1); }); };
  EXPECT_NE(message().find("input 0 of 'layers.7' was modified in place"), std::string::npos);
  MemoryMeter meter;
  message();
  EXPECT_EQ(meter.bytes(), 0) << "the input and its graph own each other";

  const Lambda reading = checkpointed(two_layers);
  const at::Tensor input = x * 1;
  const at::Tensor y = reading(input).sum();
  input.mul_(2);
  EXPECT_NE(message_of([&] { y.backward(); }).find("input 0 of 'layers.7' was modified in place"),
            std::string::npos);
}

TEST(Errors, ReportABackwardInsideItsOwnRecompute) {
  const Lambda module = checkpointed([](LambdaImpl& self, const at::Tensor& x) {
    if (self.kept.defined()) self.kept.backward();
    const at::Tensor y = at::linear(x, self.weight);
    self.kept = y.tanh().sum();
    return y.exp();
  });
  EXPECT_NE(message_of([&] { gradients_of(module); }).find("tensors that it kept from an earlier forward"),
            std::string::npos);
}

class OtherEngine : public torch::autograd::Engine {};

torch::autograd::Engine& other_engine() {
  static OtherEngine engine;
  return engine;
}

TEST(ErrorsDeathTest, ReportAnotherAutogradEngine) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // a new process, in which our engine isn't installed yet
  const auto refused = [] {
    torch::autograd::set_default_engine_stub(&other_engine);
    std::cerr << message_of([] { checkpointed(two_layers); });
    std::_Exit(0);
  };
  EXPECT_EXIT(refused(), ::testing::ExitedWithCode(0), "another one .Python's, after .import torch...");
}

TEST(Errors, ReportWritesToKeptResults) {
  class WritingImpl : public nn::Module {
   public:
    WritingImpl() { linear = register_module("linear", nn::Linear(4, 4)); }
    at::Tensor forward(const at::Tensor& x) { return linear(x).mul_(2).exp(); }
    nn::Linear linear{nullptr};
  };
  nn::Ref<WritingImpl> module(std::make_shared<WritingImpl>());
  checkpoint_activations(module, SelectiveOp{});
  const at::Tensor y = module(at::ones({2, 4}).requires_grad_()).sum();
  EXPECT_NE(message_of([&] { y.backward(); }).find("was modified in place"), std::string::npos);
}

}  // namespace
}  // namespace titan
