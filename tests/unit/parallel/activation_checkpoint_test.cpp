#include "titan/parallel/activation_checkpoint.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "titan/core/error.h"
#include "titan/nn/layers.h"
#include "unit/parallel/checkpoint_case.h"
#include "unit/parallel/lambda_module.h"

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

TEST_P(BitEqual, LossAndGradientsEqualThoseWithoutCheckpointing) {
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

TEST(KeptBytes, FullKeepsOnlyTheInput) {
  EXPECT_EQ(bytes_kept([](const auto& block) { checkpoint_activations(block, FullRecompute{}); }), 0);
}

TEST(KeptBytes, OpKeepsAttentionAndEverySecondProduct) {
  const int64_t wq = kDim, wv = kKvDim, w1 = kHidden, attention = kDim + kHeads;
  EXPECT_EQ(bytes_kept([](const auto& block) { checkpoint_activations(block, SelectiveOp{}); }),
            kTokens * kFloat * (wq + wv + w1 + attention));
  // Without early stop, the last product is recomputed or kept, too.
  EXPECT_EQ(bytes_kept([](const auto& block) {
              checkpoint_activations(block, SelectiveOp{}, {.early_stop = false});
            }),
            kTokens * kFloat * (wq + wv + w1 + attention + kDim));
}

TEST(KeptBytes, NoneKeepsWhatTheBackwardReads) {
  const int64_t norms = 2 * (kDim + 1), attention = kDim + 2 * kKvDim + kDim + kHeads;
  const int64_t residual = kDim, feed_forward = 2 * kHidden;  // SwiGLU's output is recomputed
  EXPECT_EQ(bytes_kept([](const auto& /*block*/) {}),
            kTokens * kFloat * (norms + attention + residual + feed_forward));
}

TEST(KeptBytes, ABackwardFreesEverything) {
  const auto model = make_llama();
  checkpoint_activations(layers_of(model), SelectiveOp{});
  run_steps(model);
  forget_gradients(model);
  MemoryMeter meter;
  run_steps(model);
  forget_gradients(model);
  EXPECT_EQ(meter.bytes(), 0);
}

TEST(KeptBytes, ThePeakGrowsByEachLayersInput) {
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

TEST(Products, CostTheSameAsInTorchTitan) {
  EXPECT_EQ(backward_units(std::nullopt), 8);
  EXPECT_EQ(backward_units(SelectiveOp{}), 9);
  EXPECT_EQ(backward_units(SelectiveOp{{"gate", "wq"}}), 10);
  EXPECT_EQ(backward_units(SelectiveOp{{"output"}}), 11);
  EXPECT_EQ(backward_units(FullRecompute{}), 12);
}

TEST(Products, AreChosenByNameNotByShape) {
  // gate's equal wq is counted as the first product, so output as the second.
  EXPECT_EQ(backward_units(SelectiveOp{{"gate"}}), 11);
}

// The first forward decides which modules keep their products, even if later forwards call them in another
// order.
TEST(Products, AreChosenByModule) {
  class TurningImpl : public nn::Module {
   public:
    TurningImpl() {
      for (const char* name : {"a", "b", "c", "d"})
        linears.push_back(register_module(name, nn::Linear(8, 8)));
    }
    at::Tensor forward(const at::Tensor& x) {
      at::Tensor sum = at::zeros({});
      for (const nn::Linear& linear : linears) sum = sum + linear(x).tanh().sum();
      return sum;
    }
    std::vector<nn::Linear> linears;
  };
  nn::Ref<TurningImpl> model(std::make_shared<TurningImpl>());
  const std::vector<nn::Linear> named = model->linears;
  const auto products = std::make_shared<CountingProducts>();
  nn::set_products(*model, products);
  checkpoint_activations(model, SelectiveOp{}, {.early_stop = false});
  const auto recomputed = [&] {
    const at::Tensor out = model(at::randn({8, 8}).requires_grad_());
    products->reset();
    out.backward();
    std::set<const c10::TensorImpl*> weights(products->multiplied.begin(), products->multiplied.end());
    return weights;
  };
  const std::set<const c10::TensorImpl*> second_and_fourth = {named[1]->weight.unsafeGetTensorImpl(),
                                                              named[3]->weight.unsafeGetTensorImpl()};
  EXPECT_EQ(recomputed(), second_and_fourth);
  std::reverse(model->linears.begin(), model->linears.end());
  EXPECT_EQ(recomputed(), second_and_fourth);
}

TEST(Products, EarlyStopSkipsTheLast) {
  EXPECT_EQ(backward_units(FullRecompute{}, /*early_stop=*/true), 10);
  EXPECT_EQ(backward_units(SelectiveOp{}, /*early_stop=*/true), 9);
}

class Recomputed : public ::testing::Test {
 protected:
  // Names of the products that a block's backward recomputes.
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

TEST_F(Recomputed, ProductsByOpEqualTorchTitan) {
  EXPECT_EQ(recomputed(SelectiveOp{}, /*early_stop=*/false),
            (std::set<std::string>{"attention.wk.weight", "attention.wo.weight", "feed_forward.w3.weight"}));
}

TEST_F(Recomputed, ProductsByFullAreAllButTheLast) {
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

// ---- wrapping

TEST(Wrapping, IsRefusedWhereItCannotWork) {
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
            }).find("'layers.1.ffn_norm' is listed in recompute_products"),
            std::string::npos);
}

// ---- nested checkpoints

TEST(Nested, InnerInputsAreRecomputedToo) {
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

TEST(Budget, IsNotExceeded) {
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
