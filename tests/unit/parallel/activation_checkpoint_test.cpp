#include "titan/parallel/activation_checkpoint.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>

#include "titan/core/error.h"
#include "titan/nn/containers.h"
#include "titan/nn/linear.h"
#include "unit/parallel/checkpoint_case.h"

namespace titan {
namespace {

using namespace testing;

models::Llama3 make_llama(const models::Llama3Args& args = small_llama()) {
  models::Llama3 model(args);
  nn::name_modules(*model);
  return model;
}

// ---- equal bits

struct NamedPolicy {
  std::string name;
  LayersPolicy policy;
  bool early_stop;
};

class BitEqual : public ::testing::TestWithParam<NamedPolicy> {};

TEST_P(BitEqual, LossAndGradientsAsWithout) {
  const auto& [name, policy, early_stop] = GetParam();
  const auto args = small_llama(4);
  const StepResult expected = run_steps(make_llama(args));
  const models::Llama3 model = make_llama(args);
  checkpoint_activations(layers_of(model), policy, {.early_stop = early_stop});
  EXPECT_TRUE(bit_equal(run_steps(model, 1), expected)) << "first step";
  EXPECT_TRUE(bit_equal(run_steps(model, 3), expected)) << "later steps";
}

INSTANTIATE_TEST_SUITE_P(Policies, BitEqual,
                         ::testing::Values(NamedPolicy{"Full", FullRecompute{}, true},
                                           NamedPolicy{"FullToTheEnd", FullRecompute{}, false},
                                           NamedPolicy{"Op", SelectiveOp{}, true},
                                           NamedPolicy{"OpToTheEnd", SelectiveOp{}, false},
                                           NamedPolicy{"OpByName", SelectiveOp{{"attention.wq", "w2"}}, true},
                                           NamedPolicy{"EverySecondLayer", SelectiveLayers{2}, true},
                                           NamedPolicy{"Budget", MemoryBudget{.fraction = 0.5}, true},
                                           NamedPolicy{"NoBudget", MemoryBudget{.fraction = 0}, true},
                                           NamedPolicy{"WholeBudget", MemoryBudget{.fraction = 1}, true}),
                         [](const auto& info) { return info.param.name; });

// ---- memory

int64_t bytes_kept(const std::function<void(const models::TransformerBlock&)>& wrap) {
  const auto model = make_llama(small_llama(1));
  const models::TransformerBlock block = model->layers[0];
  wrap(block);
  const at::Tensor x = at::randn({2, 16, 32}).requires_grad_();
  block(x);  // LibTorch's own first allocations
  MemoryMeter meter;
  const at::Tensor y = block(x);
  return meter.bytes() - static_cast<int64_t>(y.nbytes());
}

constexpr int64_t kTokens = 2 * 16, kFloat = 4, kDim = 32, kHidden = 96, kKvDim = 16, kHeads = 4;

TEST(KeptBytes, FullKeepsNothingButTheInput) {
  EXPECT_EQ(bytes_kept([](const auto& block) { checkpoint_activations(block, FullRecompute{}); }), 0);
}

TEST(KeptBytes, OpKeepsAttentionAndEverySecondProduct) {
  const int64_t wq = kDim, wv = kKvDim, w1 = kHidden, attention = kDim + kHeads;
  EXPECT_EQ(bytes_kept([](const auto& block) { checkpoint_activations(block, SelectiveOp{}); }),
            kTokens * kFloat * (wq + wv + w1 + attention));
  // To the end, the last product is run again, or kept.
  EXPECT_EQ(bytes_kept([](const auto& block) {
              checkpoint_activations(block, SelectiveOp{}, {.early_stop = false});
            }),
            kTokens * kFloat * (wq + wv + w1 + attention + kDim));
}

TEST(KeptBytes, NoneKeepsWhatTheBackwardReads) {
  const int64_t norms = 2 * (kDim + 1), attention = kDim + 2 * kKvDim + kDim + kHeads;
  const int64_t residual = kDim, feed_forward = 2 * kHidden;  // SwiGLU's output is made again
  EXPECT_EQ(bytes_kept([](const auto& /*block*/) {}),
            kTokens * kFloat * (norms + attention + residual + feed_forward));
}

void forget_gradients(const models::Llama3& model) {
  for (const at::Tensor& parameter : model->parameters()) parameter.mutable_grad().reset();
}

TEST(KeptBytes, ABackwardLeavesNothing) {
  const auto model = make_llama();
  checkpoint_activations(layers_of(model), SelectiveOp{});
  run_steps(model);
  forget_gradients(model);
  MemoryMeter meter;
  run_steps(model);
  forget_gradients(model);
  EXPECT_EQ(meter.bytes(), 0);
}

TEST(KeptBytes, PeakGrowsByTheInputsOfLayers) {
  const auto peak = [](int64_t num_layers, bool checkpoint) {
    const auto model = make_llama(small_llama(num_layers));
    if (checkpoint) checkpoint_activations(layers_of(model), FullRecompute{});
    run_steps(model);
    forget_gradients(model);
    MemoryMeter meter;
    run_steps(model);
    return meter.peak();
  };
  const int64_t input = 48 * kDim * kFloat;
  const int64_t gradients = (2 * kDim * (kDim + kKvDim) + 3 * kDim * kHidden + 2 * kDim) * kFloat;
  EXPECT_LT(peak(8, true) - peak(4, true), 4 * (input + gradients));
  EXPECT_GT(peak(8, false) - peak(4, false), 4 * 10 * input);
}

// ---- products

// TorchTitan's unit check: three products of 1, 1 and 2 units.
class ThreeProductsImpl : public nn::Module {
 public:
  ThreeProductsImpl() {
    gate = register_module("gate", nn::Linear(8, 8));
    wq = register_module("wq", nn::Linear(8, 8));
    output = register_module("output", nn::Linear(8, 16));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor gated = gate(x);
    return output(wq(x)).sum() + gated.sum();
  }
  nn::Linear gate{nullptr}, wq{nullptr}, output{nullptr};
};
TITAN_MODULE(ThreeProducts);

int64_t backward_units(const std::optional<ModulePolicy>& policy, bool early_stop = false) {
  ThreeProducts model;
  const auto products = std::make_shared<CountingProducts>();
  nn::set_products(*model, products);
  if (policy) checkpoint_activations(model, *policy, {.early_stop = early_stop});
  const at::Tensor x = at::randn({8, 8}).requires_grad_();
  model(x).backward();
  const at::Tensor out = model(x);
  products->reset();
  out.backward();
  return products->multiplications / (8 * 8 * 8);
}

TEST(Products, CostAsTorchTitans) {
  EXPECT_EQ(backward_units(std::nullopt), 8);
  EXPECT_EQ(backward_units(SelectiveOp{}), 9);
  EXPECT_EQ(backward_units(SelectiveOp{{"gate", "wq"}}), 10);
  EXPECT_EQ(backward_units(SelectiveOp{{"output"}}), 11);
  EXPECT_EQ(backward_units(FullRecompute{}), 12);
}

TEST(Products, NamesAreNotShapes) {
  // gate's equal wq is counted as the first product, so output as the second.
  EXPECT_EQ(backward_units(SelectiveOp{{"gate"}}), 11);
}

TEST(Products, EarlyStopLeavesOutTheLast) {
  EXPECT_EQ(backward_units(FullRecompute{}, /*early_stop=*/true), 10);
  EXPECT_EQ(backward_units(SelectiveOp{}, /*early_stop=*/true), 9);
}

class Recomputed : public ::testing::Test {
 protected:
  // Names of the products that a block's backward runs again.
  std::set<std::string> recomputed(const ModulePolicy& policy, bool early_stop) {
    auto model = make_llama(small_llama(1));
    const models::TransformerBlock block = model->layers[0];
    const auto products = std::make_shared<CountingProducts>();
    nn::set_products(*model, products);
    checkpoint_activations(block, policy, {.early_stop = early_stop});
    const at::Tensor out = block(at::randn({2, 16, 32}).requires_grad_());
    products->reset();
    out.sum().backward();
    std::set<std::string> names;
    for (const auto& named : block->named_parameters())
      if (std::count(products->multiplied.begin(), products->multiplied.end(),
                     named.value().unsafeGetTensorImpl()) > 0)
        names.insert(named.key());
    return names;
  }
};

TEST_F(Recomputed, ByOpAreTorchTitans) {
  EXPECT_EQ(recomputed(SelectiveOp{}, /*early_stop=*/false),
            (std::set<std::string>{"attention.wk.weight", "attention.wo.weight", "feed_forward.w3.weight"}));
}

TEST_F(Recomputed, FullAllButTheLast) {
  EXPECT_EQ(
      recomputed(FullRecompute{}, /*early_stop=*/true),
      (std::set<std::string>{"attention.wq.weight", "attention.wk.weight", "attention.wv.weight",
                             "attention.wo.weight", "feed_forward.w1.weight", "feed_forward.w3.weight"}));
}

int num_attentions = 0;

TEST(KeptAttention, IsNotRunAgain) {
  const auto count = [](const ModulePolicy& policy) {
    const auto model = make_llama(small_llama(1));
    checkpoint_activations(model->layers[0], policy);
    const auto handle = at::addThreadLocalCallback(at::RecordFunctionCallback(
        [](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
          if (std::string(function.name()) == "titan::causal_attention") ++num_attentions;
          return nullptr;
        }));
    const at::Tensor out = model->layers[0](at::randn({2, 16, 32}).requires_grad_());
    num_attentions = 0;
    out.sum().backward();
    at::removeCallback(handle);
    return num_attentions;
  };
  EXPECT_EQ(count(FullRecompute{}), 1);
  EXPECT_EQ(count(SelectiveOp{}), 0);
}

TEST(Layers, AreCountedByNumber) {
  const auto wrapped = [](int64_t n, int64_t first_number) {
    const auto model = make_llama(small_llama(5));
    checkpoint_activations(layers_of(model), SelectiveLayers{n}, {}, first_number);
    std::vector<int> which;
    for (int i = 0; i < 5; ++i)
      if (model->layers[static_cast<size_t>(i)]->checkpoint_hook) which.push_back(i);
    return which;
  };
  EXPECT_EQ(wrapped(2, 0), (std::vector{1, 3}));
  EXPECT_EQ(wrapped(1, 0), (std::vector{0, 1, 2, 3, 4}));
  EXPECT_EQ(wrapped(3, 4), (std::vector{1, 4}));  // layers 5 and 8 of the whole model
}

// ---- what modules may be like

// Calls `body`, so that each test writes the forward that it is about.
class LambdaImpl : public nn::Module {
 public:
  using Body = std::function<at::Tensor(LambdaImpl&, const at::Tensor&)>;
  explicit LambdaImpl(Body body) : body_(std::move(body)) {
    weight = register_parameter("weight", at::linspace(-1, 1, 16).view({4, 4}));
    frozen = register_parameter("frozen", at::linspace(1, 2, 4), /*requires_grad=*/false);
  }
  at::Tensor forward(const at::Tensor& x) { return body_(*this, x); }
  at::Tensor weight, frozen;
  int calls = 0;

 private:
  Body body_;
};
TITAN_MODULE(Lambda);

at::Tensor two_layers(LambdaImpl& self, const at::Tensor& x) {
  ++self.calls;
  return at::linear(at::tanh(at::linear(x, self.weight) * self.frozen), self.weight).exp();
}

struct Gradients {
  at::Tensor x, weight;
};

Gradients gradients_of(const Lambda& module, bool x_needs_grad = true, int calls = 1) {
  at::Tensor x = at::linspace(-1, 1, 12).view({3, 4}).set_requires_grad(x_needs_grad);
  at::Tensor y = x;
  for (int i = 0; i < calls; ++i) y = module(y);
  y.sum().backward();
  return {x.grad(), module->weight.grad()};
}

Lambda checkpointed(LambdaImpl::Body body, const CheckpointOptions& options = {}) {
  Lambda module(std::move(body));
  module->set_fqn("layers.7");
  checkpoint_activations(module, FullRecompute{}, options);
  return module;
}

TEST(Modules, OfLibTorchsOperations) {
  const Gradients expected = gradients_of(Lambda(two_layers));
  const Lambda module = checkpointed(two_layers);
  const Gradients got = gradients_of(module);
  EXPECT_TRUE(got.x.equal(expected.x));
  EXPECT_TRUE(got.weight.equal(expected.weight));
  EXPECT_EQ(module->calls, 2);
}

TEST(Modules, WithInputsThatNeedNoGradient) {
  const Gradients expected = gradients_of(Lambda(two_layers), false);
  const Gradients got = gradients_of(checkpointed(two_layers), false);
  EXPECT_FALSE(got.x.defined());
  EXPECT_TRUE(got.weight.equal(expected.weight));
}

TEST(Modules, CalledTwiceInOneForward) {
  const Gradients expected = gradients_of(Lambda(two_layers), true, 2);
  const Lambda module = checkpointed(two_layers);
  const Gradients got = gradients_of(module, true, 2);
  EXPECT_TRUE(got.x.equal(expected.x));
  EXPECT_TRUE(got.weight.equal(expected.weight));
  EXPECT_EQ(module->calls, 4);
}

TEST(Modules, WithoutGradientsRunOnceAndSaveNothing) {
  const Lambda module = checkpointed(two_layers);
  const at::NoGradGuard no_grad;
  MemoryMeter meter;
  const at::Tensor y = module(at::ones({3, 4}));
  EXPECT_EQ(module->calls, 1);
  EXPECT_FALSE(y.requires_grad());
  EXPECT_EQ(meter.bytes(), static_cast<int64_t>(y.nbytes()));
}

TEST(Modules, WithAGraphThatIsWalkedTwice) {
  const Lambda module = checkpointed(two_layers);
  const at::Tensor x = at::ones({3, 4}).requires_grad_();
  const at::Tensor y = module(x).sum();
  y.backward({}, /*retain_graph=*/true);
  const at::Tensor once = x.grad().clone();
  y.backward();
  EXPECT_TRUE(x.grad().equal(once * 2));
  EXPECT_EQ(module->calls, 3);
}

TEST(Modules, WhoseBackwardWantsOnePartOnly) {
  const Lambda module = checkpointed(two_layers);
  const Gradients expected = gradients_of(Lambda(two_layers));
  const at::Tensor x = at::linspace(-1, 1, 12).view({3, 4}).requires_grad_();
  const at::Tensor y = module(x).sum();
  EXPECT_TRUE(torch::autograd::grad({y}, {x}, {}, /*retain_graph=*/true)[0].equal(expected.x));
  // The parameter has another value by now, and the tensors of the first backward aren't used again.
  module->weight.data().mul_(0.5);
  const Lambda halved(two_layers);
  halved->weight.data().mul_(0.5);
  const Gradients of_halved = gradients_of(halved);
  const at::Tensor again = torch::autograd::grad({y}, {x})[0];
  EXPECT_FALSE(again.equal(expected.x));
  EXPECT_EQ(again.sizes(), of_halved.x.sizes());
}

TEST(Modules, WithABackwardOfTheirOwn) {
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

TEST(Modules, WithSeveralInputsAndOutputs) {
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

TEST(Modules, OneOfWhoseOutputsIsNotUsed) {
  Many module;
  checkpoint_activations(module, FullRecompute{});
  const at::Tensor a = at::linspace(0, 1, 8).view({2, 4}).requires_grad_();
  {
    const auto [first, second] = module(a, std::nullopt, at::tensor({1, 0, 1}), 0.25);
    first.sum().backward();  // the nodes of `second` die without asking
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

TEST(RandomNumbers, AreTheForwardsInTheRecompute) {
  at::manual_seed(3);
  const Gradients expected = gradients_of(Lambda(with_dropout));
  const at::Tensor next = at::rand({4});
  at::manual_seed(3);
  const Gradients got = gradients_of(checkpointed(with_dropout));
  EXPECT_TRUE(got.x.equal(expected.x));
  EXPECT_TRUE(got.weight.equal(expected.weight));
  EXPECT_TRUE(at::rand({4}).equal(next)) << "the recompute leaves the generator where it was";
}

TEST(RandomNumbers, AreOthersWithoutTheState) {
  at::manual_seed(3);
  const Gradients expected = gradients_of(Lambda(with_dropout));
  at::manual_seed(3);
  const Gradients got = gradients_of(checkpointed(with_dropout, {.preserve_rng_state = false}));
  EXPECT_FALSE(got.x.equal(expected.x));
}

// ---- errors

std::string message_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

TEST(Errors, OfARecomputeComeOutOfTheBackward) {
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
  // And nothing of the checkpoint is left on this thread.
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

TEST(Errors, AKeptResultIsNotWrittenTo) {
  class WritingImpl : public nn::Module {
   public:
    WritingImpl() { linear = register_module("linear", nn::Linear(4, 4)); }
    at::Tensor forward(const at::Tensor& x) { return linear(x).mul_(2).exp(); }
    nn::Linear linear{nullptr};
  };
  nn::Ref<WritingImpl> module(std::make_shared<WritingImpl>());
  checkpoint_activations(module, SelectiveOp{});
  const at::Tensor y = module(at::ones({2, 4}).requires_grad_()).sum();
  EXPECT_NE(message_of([&] { y.backward(); }).find("was written to"), std::string::npos);
}

TEST(Errors, OfWrapping) {
  const auto model = make_llama();
  checkpoint_activations(model->layers[0], FullRecompute{});
  EXPECT_NE(message_of([&] {
              checkpoint_activations(model->layers[0], SelectiveOp{});
            }).find("'layers.0' is checkpointed already"),
            std::string::npos);
  EXPECT_NE(message_of([&] {
              checkpoint_activations(model->layers[1], OffloadActivations{});
            }).find("'layers.1' is on the CPU"),
            std::string::npos);
  EXPECT_NE(message_of([&] {
              checkpoint_activations(model->layers[1], SelectiveOp{{"ffn_norm"}});
            }).find("'layers.1.ffn_norm' is to be recomputed by name"),
            std::string::npos);
}

// ---- one inside another

TEST(Nested, InnerInputsAreComputedAgainToo) {
  const auto args = small_llama(1);
  const StepResult expected = run_steps(make_llama(args));
  const auto model = make_llama(args);
  checkpoint_activations(model->layers[0], FullRecompute{});
  checkpoint_activations(model->layers[0]->attention, FullRecompute{});
  checkpoint_activations(model->layers[0]->feed_forward, SelectiveOp{});
  EXPECT_TRUE(bit_equal(run_steps(model), expected));
  EXPECT_EQ(bytes_kept([](const auto& block) {
              checkpoint_activations(block, FullRecompute{});
              checkpoint_activations(block->attention, FullRecompute{});
            }),
            0);
}

// ---- a budget

TEST(Budget, IsKept) {
  const auto kept = [](const std::optional<LayersPolicy>& policy) {
    const auto model = make_llama(small_llama(6));
    if (policy) checkpoint_activations(layers_of(model), *policy);
    run_steps(model, 2);
    const at::Tensor tokens = at::arange(48).remainder(61).view({3, 16});
    MemoryMeter meter;
    const at::Tensor loss = model(tokens, tokens, int64_t{48});
    return meter.bytes();
  };
  const int64_t none = kept(std::nullopt), full = kept(FullRecompute{});
  EXPECT_EQ(kept(MemoryBudget{.fraction = 0}), full);
  EXPECT_EQ(kept(MemoryBudget{.fraction = 1}), none);
  const int64_t half = kept(MemoryBudget{.fraction = 0.5});
  EXPECT_GT(half, full);
  EXPECT_LE(half, (none + full) / 2);
}

TEST(Budget, TooSmallIsAnError) {
  const auto model = make_llama();
  checkpoint_activations(layers_of(model), MemoryBudget{.bytes = 1000});
  run_steps(model);
  EXPECT_NE(message_of([&] { run_steps(model); }).find("less than"), std::string::npos);
}

}  // namespace
}  // namespace titan
