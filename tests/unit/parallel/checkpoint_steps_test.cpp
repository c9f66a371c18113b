// Steps other than one forward and its backward: several forwards before a backward, as in pipelines, several
// models and threads, and steps that end in an exception.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <stdexcept>
#include <thread>

#include "ops/saved_outputs.h"
#include "titan/nn/layers.h"
#include "titan/parallel/activation_checkpoint.h"
#include "unit/parallel/checkpoint_case.h"

namespace titan {
namespace {

using namespace testing;

struct StepsPolicy {
  std::string name;
  LayersPolicy policy;
};

class CheckpointSteps : public ::testing::TestWithParam<StepsPolicy> {
 protected:
  models::Llama3 make(int64_t num_layers = 3) const {
    models::Llama3 model(small_llama(num_layers));
    nn::name_modules(*model);
    checkpoint_activations(layers_of(model), GetParam().policy);
    return model;
  }
};

TEST_P(CheckpointSteps, ForwardsAndBackwardsMayTakeAnyOrder) {
  for (const std::string& order : kOrders) {
    const StepResult expected = run_order(models::Llama3(small_llama(3)), order);
    const models::Llama3 model = make();
    for (int step = 0; step < 3; ++step)
      EXPECT_TRUE(bit_equal(run_order(model, order), expected)) << order << ", step " << step;
  }
}

TEST_P(CheckpointSteps, AForwardWithoutABackwardKeepsNoMemory) {
  const models::Llama3 model = make();
  run_steps(model, 2);
  forget_gradients(model);
  MemoryMeter meter;
  loss_of(model);
  EXPECT_EQ(meter.bytes(), 0);
}

/// Throws in a forward product, after a countdown.
class FailingProducts : public CountingProducts {
 public:
  at::Tensor forward(const ops::Operand& x, const ops::Operand& weight) const override {
    if (--until_failure == 0) throw std::runtime_error("a product fails");
    return CountingProducts::forward(x, weight);
  }
  mutable int until_failure = 0;  // 0: none
};

TEST_P(CheckpointSteps, TheStepAfterAnExceptionIsUnaffected) {
  const StepResult expected = run_steps(models::Llama3(small_llama(3)));
  models::Llama3 model = make();
  const auto products = std::make_shared<FailingProducts>();
  nn::set_products(*model, products);
  loss_of(model);  // LibTorch's own first allocations
  for (int attempt = 0; attempt < 2; ++attempt) {
    forget_gradients(model);
    MemoryMeter meter;
    products->until_failure = 10;  // in the second layer's forward
    EXPECT_THROW(loss_of(model), std::runtime_error);
    {
      const at::Tensor loss = loss_of(model);
      products->until_failure = 3;  // in the last layer's recompute
      EXPECT_THROW(loss.backward(), std::runtime_error);
      products->until_failure = 0;
    }
    EXPECT_EQ(ops::SavedOutputs::current(), nullptr);
    forget_gradients(model);
    EXPECT_EQ(meter.bytes(), 0);
    EXPECT_TRUE(bit_equal(run_steps(model), expected)) << attempt;
  }
}

TEST_P(CheckpointSteps, ModelsCanAlternate) {
  const models::Llama3 a = make(3), b = make(2);
  const StepResult expected_a = run_steps(models::Llama3(small_llama(3))),
                   expected_b = run_steps(models::Llama3(small_llama(2)));
  for (int step = 0; step < 3; ++step) {
    forget_gradients(a);
    forget_gradients(b);
    const at::Tensor loss_a = loss_of(a), loss_b = loss_of(b);
    loss_a.backward();
    loss_b.backward();
    EXPECT_TRUE(bit_equal(result_of(a, loss_a), expected_a)) << step;
    EXPECT_TRUE(bit_equal(result_of(b, loss_b), expected_b)) << step;
  }
}

TEST_P(CheckpointSteps, ThreadsCanRunSeparateModels) {
  const StepResult expected = run_steps(models::Llama3(small_llama(3)));
  constexpr size_t kThreads = 3;
  std::vector<models::Llama3> trained;
  for (size_t i = 0; i < kThreads; ++i) trained.push_back(make());
  std::vector<StepResult> results(kThreads);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < kThreads; ++i)
    threads.emplace_back([&, i] { results[i] = run_steps(trained[i], 3); });
  for (std::thread& thread : threads) thread.join();
  for (const StepResult& result : results) EXPECT_TRUE(bit_equal(result, expected));
}

INSTANTIATE_TEST_SUITE_P(Policies, CheckpointSteps,
                         ::testing::Values(StepsPolicy{"Full", FullRecompute{}},
                                           StepsPolicy{"Op", SelectiveOp{}},
                                           StepsPolicy{"EverySecondLayer", SelectiveLayers{2}},
                                           StepsPolicy{"Budget", MemoryBudget{.fraction = 0.5}}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace titan
