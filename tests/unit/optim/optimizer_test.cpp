#include "titan/optim/optimizer.h"

#include <cmath>

#include <gtest/gtest.h>

#include "tensor/memory.h"
#include "titan/core/error.h"
#include "unit/optim/make_parameters.h"

namespace titan::optim {
namespace {

using testing::make_parameter;
using testing::set_grad;

// The papers' formulas for one number, in double.
struct ScalarAdam {
  OptimizerSettings settings;
  double value, exp_avg = 0, exp_avg_sq = 0;
  int step = 0;

  void update(double grad, double lr) {
    ++step;
    bool decoupled = settings.name == "AdamW";
    if (decoupled) value -= lr * settings.weight_decay * value;
    if (!decoupled) grad += settings.weight_decay * value;
    exp_avg = settings.beta1 * exp_avg + (1 - settings.beta1) * grad;
    exp_avg_sq = settings.beta2 * exp_avg_sq + (1 - settings.beta2) * grad * grad;
    double mean = exp_avg / (1 - std::pow(settings.beta1, step));
    double square = exp_avg_sq / (1 - std::pow(settings.beta2, step));
    value -= lr * mean / (std::sqrt(square) + settings.eps);
  }
};

class OptimizerKinds : public ::testing::TestWithParam<std::tuple<const char*, const char*, at::ScalarType>> {
 protected:
  OptimizerSettings settings() const {
    return {.name = std::get<0>(GetParam()),
            .lr = 1e-2,
            .implementation = std::get<1>(GetParam()),
            .param_groups = {}};
  }
  at::ScalarType dtype() const { return std::get<2>(GetParam()); }
  double tolerance() const { return dtype() == at::kDouble ? 1e-12 : 3e-6; }
};

TEST_P(OptimizerKinds, FollowsTheFormula) {
  at::manual_seed(1);
  std::vector<Parameter> parameters = {make_parameter("a", at::randn({5, 3}, dtype())),
                                       make_parameter("b", at::randn({7}, dtype())),
                                       make_parameter("empty", at::empty({0, 3}, dtype()))};
  std::vector<ScalarAdam> expected;
  for (const auto& parameter : parameters) {
    at::Tensor flat = parameter.data.local.detach().to(at::kDouble).reshape(-1);
    for (int64_t i = 0; i < flat.numel(); ++i)
      expected.push_back({.settings = settings(), .value = flat[i].item<double>()});
  }
  Optimizer optimizer(parameters, settings());
  for (int step = 0; step < 10; ++step) {
    double factor = 1.0 / (1 + step);
    optimizer.set_lr_factor(factor);
    size_t element = 0;
    for (const auto& parameter : parameters) {
      at::Tensor grad = at::randn(parameter.data.local.sizes(), dtype());
      set_grad(parameter, grad);
      at::Tensor flat = grad.to(at::kDouble).reshape(-1);
      for (int64_t i = 0; i < flat.numel(); ++i)
        expected[element++].update(flat[i].item<double>(), 1e-2 * factor);
    }
    optimizer.step();
  }
  size_t element = 0;
  auto state = optimizer.state();
  for (const auto& parameter : parameters) {
    at::Tensor flat = parameter.data.local.detach().to(at::kDouble).reshape(-1);
    at::Tensor exp_avg = state.find(parameter.name)->second.at("exp_avg").local.to(at::kDouble).reshape(-1);
    for (int64_t i = 0; i < flat.numel(); ++i, ++element) {
      EXPECT_NEAR(flat[i].item<double>(), expected[element].value, tolerance());
      EXPECT_NEAR(exp_avg[i].item<double>(), expected[element].exp_avg, tolerance());
    }
    EXPECT_EQ(state.find(parameter.name)->second.at("step").local.item<float>(), 10);
  }
}

TEST_P(OptimizerKinds, LeavesParametersWithoutGradient) {
  std::vector<Parameter> parameters = {make_parameter("used", at::ones({3}, dtype())),
                                       make_parameter("unused", at::ones({3}, dtype()))};
  Optimizer optimizer(parameters, settings());
  set_grad(parameters[0], at::ones({3}, dtype()));
  optimizer.step();
  EXPECT_TRUE(at::equal(parameters[1].data.local.detach(), at::ones({3}, dtype())));
  EXPECT_FALSE(at::equal(parameters[0].data.local.detach(), at::ones({3}, dtype())));
  EXPECT_EQ(optimizer.state().find("unused")->second.at("step").local.item<float>(), 0);
  EXPECT_EQ(optimizer.state().find("used")->second.at("step").local.item<float>(), 1);
}

TEST_P(OptimizerKinds, AcceptsGradientsOfAnotherLayout) {
  at::Tensor values = at::randn({4, 6}, dtype()), grad = at::randn({6, 4}, dtype()).t();
  std::vector<Parameter> plain = {make_parameter("w", values)}, strided = {make_parameter("w", values)};
  set_grad(plain[0], grad.contiguous());
  set_grad(strided[0], grad);
  Optimizer(plain, settings()).step();
  Optimizer(strided, settings()).step();
  EXPECT_TRUE(at::equal(plain[0].data.local, strided[0].data.local));
}

INSTANTIATE_TEST_SUITE_P(All, OptimizerKinds,
                         ::testing::Combine(::testing::Values("Adam", "AdamW"),
                                            ::testing::Values("fused", "foreach", "for-loop"),
                                            ::testing::Values(at::kFloat, at::kDouble)));

TEST(Optimizer, StepsBfloat16Parameters) {
  for (const char* implementation : {"fused", "foreach", "for-loop"}) {
    std::vector<Parameter> parameters = {make_parameter("w", at::ones({8}, at::kBFloat16))};
    Optimizer optimizer(parameters, {.lr = 0.5, .implementation = implementation, .param_groups = {}});
    set_grad(parameters[0], at::ones({8}, at::kBFloat16));
    optimizer.step();
    EXPECT_NEAR(parameters[0].data.local[0].item<double>(), 1 - 0.5 * 0.1 - 0.5, 4e-3) << implementation;
  }
}

TEST(Optimizer, SkipsAStepOnTheDevice) {
  std::vector<Parameter> skipping = {make_parameter("a", at::ones({4}))};
  std::vector<Parameter> plain = {make_parameter("a", at::ones({4}))};
  Optimizer with_skips(skipping, {.lr = 0.1}), without(plain, {.lr = 0.1});
  for (const bool skip : {false, true, false}) {
    set_grad(skipping[0], at::full({4}, skip ? NAN : 2.0));
    set_grad(plain[0], at::full({4}, 2.0));
    with_skips.step_unless(at::full({}, skip ? 1.0 : 0.0, at::kFloat));
    if (!skip) without.step();
    EXPECT_TRUE(at::equal(skipping[0].data.local, plain[0].data.local));
    EXPECT_TRUE(at::equal(with_skips.state().find("a")->second.at("exp_avg").local,
                          without.state().find("a")->second.at("exp_avg").local));
    EXPECT_TRUE(at::equal(with_skips.state().find("a")->second.at("step").local,
                          without.state().find("a")->second.at("step").local));
  }
  Optimizer foreach (plain, {.implementation = "foreach"});
  EXPECT_THROW(foreach.step_unless(at::zeros({})), Error);
}

TEST(Optimizer, StatesInBfloat16TakeHalfTheMemory) {
  const auto bytes = [](std::optional<std::string> state_dtype, at::ScalarType dtype) {
    Optimizer optimizer({make_parameter("w", at::ones({64, 64}, dtype))},
                        {.state_dtype = std::move(state_dtype)});
    optimizer.state();
    size_t sum = 0;
    for (const at::Tensor& tensor : optimizer.allocated_state()) sum += tensor.nbytes();
    return sum;
  };
  EXPECT_EQ(bytes({}, at::kFloat), 2u * 64 * 64 * 4);
  EXPECT_EQ(bytes("bfloat16", at::kFloat), 2u * 64 * 64 * 2);
  EXPECT_EQ(bytes("float32", at::kBFloat16), 2u * 64 * 64 * 4);
  EXPECT_EQ(bytes({}, at::kBFloat16), 2u * 64 * 64 * 2);
}

TEST(Optimizer, FollowsTheFormulaWithStatesInBfloat16) {
  at::manual_seed(1);
  for (const char* name : {"Adam", "AdamW"})
    for (const bool stochastic : {false, true}) {
      const at::Tensor start = at::randn({5, 3});
      const std::vector<Parameter> parameters = {make_parameter("a", start)},
                                   in_fp32 = {make_parameter("a", start)};
      OptimizerSettings settings{.name = name, .lr = 1e-2};
      Optimizer expected(in_fp32, settings);
      settings.state_dtype = "bfloat16";
      settings.stochastic_rounding = stochastic;
      Optimizer optimizer(parameters, settings);
      for (int step = 0; step < 10; ++step) {
        const at::Tensor grad = at::randn({5, 3});
        set_grad(parameters[0], grad);
        set_grad(in_fp32[0], grad);
        optimizer.step();
        expected.step();
      }
      // Each step rounds both averages by up to 2^-8 of their size, and moves by about lr.
      EXPECT_TRUE(at::allclose(parameters[0].data.local, in_fp32[0].data.local, 0, 10 * 1e-2 * 0x1p-6));
      EXPECT_FALSE(at::equal(parameters[0].data.local, in_fp32[0].data.local));
    }
}

// Steps of less than half of the distance between bf16 numbers.
TEST(Optimizer, StochasticRoundingMovesParametersInBfloat16) {
  for (const bool stochastic : {false, true}) {
    std::vector<Parameter> parameters = {make_parameter("w", at::ones({4096}, at::kBFloat16))};
    Optimizer optimizer(parameters, {.lr = 1e-4, .weight_decay = 0, .stochastic_rounding = stochastic});
    for (int step = 0; step < 100; ++step) {
      set_grad(parameters[0], at::ones({4096}, at::kBFloat16));
      optimizer.step();
    }
    const double mean = parameters[0].data.local.to(at::kDouble).mean().item<double>();
    if (stochastic)
      EXPECT_NEAR(mean, 1 - 100 * 1e-4, 1e-3);
    else
      EXPECT_EQ(mean, 1);
  }
}

TEST(Optimizer, RoundingDependsOnSeedNameAndStep) {
  const auto step = [](const std::string& name, uint64_t seed) {
    std::vector<Parameter> parameters = {make_parameter(name, at::ones({256}))};
    Optimizer optimizer(parameters, {.state_dtype = "bfloat16", .stochastic_rounding = true, .seed = seed});
    set_grad(parameters[0], at::full({256}, 0.7371));
    optimizer.step();
    return optimizer.state().find(name)->second.at("exp_avg").local;
  };
  EXPECT_TRUE(at::equal(step("a", 1), step("a", 1)));
  EXPECT_FALSE(at::equal(step("a", 1), step("b", 1)));
  EXPECT_FALSE(at::equal(step("a", 1), step("a", 2)));
}

TEST(Optimizer, SkipsAStepWithStatesInBfloat16) {
  std::vector<Parameter> parameters = {make_parameter("a", at::ones({4}))};
  Optimizer optimizer(parameters, {.lr = 0.1, .state_dtype = "bfloat16", .stochastic_rounding = true});
  set_grad(parameters[0], at::full({4}, 2.0));
  optimizer.step_unless(at::zeros({}, at::kFloat), at::full({}, 0.5, at::kDouble));
  EXPECT_NEAR(optimizer.state().find("a")->second.at("exp_avg").local[0].item<double>(), 0.1, 1e-3);
  const at::Tensor before = parameters[0].data.local.detach().clone();
  const auto version = parameters[0].data.local._version();
  set_grad(parameters[0], at::full({4}, NAN));
  optimizer.step_unless(at::ones({}, at::kFloat));
  EXPECT_TRUE(at::equal(parameters[0].data.local, before));
  EXPECT_EQ(optimizer.state().find("a")->second.at("step").local.item<float>(), 1);
  EXPECT_GT(parameters[0].data.local._version(), version);
}

TEST(Optimizer, OnlyTheFusedStepRoundsStates) {
  for (const char* implementation : {"foreach", "for-loop"}) {
    const std::vector<Parameter> parameters = {make_parameter("w", at::ones({3}))};
    EXPECT_THROW(Optimizer(parameters, {.implementation = implementation, .state_dtype = "bfloat16"}),
                 ConfigError);
    EXPECT_THROW(Optimizer(parameters, {.implementation = implementation, .stochastic_rounding = true}),
                 ConfigError);
  }
}

TEST(Optimizer, FrozenParametersHaveNoState) {
  std::vector<Parameter> parameters = {make_parameter("w", at::ones({3})),
                                       make_parameter("frozen", at::ones({3}))};
  parameters[1].data.local.requires_grad_(false);
  Optimizer optimizer(parameters, {});
  EXPECT_EQ(optimizer.state().count("frozen"), 0u);
  EXPECT_EQ(optimizer.state().count("w"), 1u);
}

TEST(Optimizer, RefusesParametersThatItCannotStep) {
  std::vector<Parameter> parameters = {make_parameter("w", at::ones({3}))};
  parameters[0].data.local = parameters[0].data.local * 2;
  EXPECT_THROW(Optimizer(parameters, {}), Error);
  parameters = {make_parameter("w", at::ones({3}))};
  parameters[0].data.local = deferred_tensor({3}, at::dtype(at::kFloat)).requires_grad_(true);
  EXPECT_THROW(Optimizer(parameters, {}), Error);
}

TEST(Optimizer, ZeroGradFillsOrForgetsGradients) {
  std::vector<Parameter> parameters = {make_parameter("w", at::ones({3}))};
  Optimizer optimizer(parameters, {});
  at::Tensor buffer = at::ones({3});
  set_grad(parameters[0], buffer);
  optimizer.zero_grad(/*set_to_none=*/false);
  EXPECT_TRUE(parameters[0].data.local.grad().is_same(buffer));
  EXPECT_EQ(buffer.sum().item<float>(), 0);
  optimizer.zero_grad();
  EXPECT_FALSE(parameters[0].data.local.grad().defined());
}

TEST(Optimizer, AppliesGroupsByName) {
  std::vector<Parameter> parameters = {make_parameter("layers.0.norm.weight", at::ones({2}, at::kDouble)),
                                       make_parameter("layers.0.w1.weight", at::ones({2}, at::kDouble)),
                                       make_parameter("output.weight", at::ones({2}, at::kDouble))};
  Optimizer optimizer(parameters,
                      {.lr = 0.1,
                       .eps = 0,
                       .weight_decay = 0.5,
                       .param_groups = {"norm: weight_decay=0", "layers\\.0: lr=0.2, weight_decay=1"}});
  for (const auto& parameter : parameters) set_grad(parameter, at::ones({2}, at::kDouble));
  optimizer.step();
  // The first step of Adam moves by lr in the gradient's direction.
  EXPECT_NEAR(parameters[0].data.local[0].item<double>(), 1 - 0.1, 1e-12);
  EXPECT_NEAR(parameters[1].data.local[0].item<double>(), 1 - 0.2 - 0.2, 1e-12);
  EXPECT_NEAR(parameters[2].data.local[0].item<double>(), 1 - 0.05 - 0.1, 1e-12);
  EXPECT_EQ(optimizer.lr(), 0.1);
}

TEST(Optimizer, ReportsAllBadGroups) {
  std::vector<Parameter> parameters = {make_parameter("w", at::ones({2}))};
  OptimizerSettings settings{.param_groups = {"nrom: lr=1", "w: wd=1", "w: lr=-1", "w(: lr=1", "w",
                                              "w: beta1=1", "w: lr=inf", "w: lr"}};
  try {
    Optimizer optimizer(parameters, settings);
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_EQ(error.problems().size(), 8u) << error.what();
    EXPECT_NE(error.problems()[0].find("matches no parameter"), std::string::npos);
    EXPECT_NE(error.problems()[1].find("unknown key 'wd'"), std::string::npos);
  }
}

// ---- a registered rule

struct MomentumArgs {
  double momentum = 0.5;
  int64_t every = 1;
};
void describe(config::Table<MomentumArgs>& table) {
  table.field("momentum", &MomentumArgs::momentum, "share of the last direction",
              config::in_range_below(0, 1));
  table.field("every", &MomentumArgs::every, "steps between updates", config::at_least(1));
}

void momentum_step(const MomentumArgs& args, const Update& update) {
  for (size_t i = 0; i < update.params.size(); ++i) {
    at::Tensor param = update.params[i], direction = update.state[0][i];
    direction.mul_(args.momentum).add_(update.grads[i]);
    if (update.steps[i].item<int64_t>() % args.every == 0) param.sub_(direction, update.lr);
  }
}

class RegisteredRule : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    optimizers().add("momentum", OptimizerRule<MomentumArgs>{.state = {"direction"}, .step = momentum_step});
  }
  std::vector<Parameter> parameters{make_parameter("a.weight", at::ones({2})),
                                    make_parameter("b.norm", at::ones({2}))};
  void step(Optimizer& optimizer) {
    for (const Parameter& parameter : parameters) set_grad(parameter, at::ones({2}));
    optimizer.step();
  }
  double value(size_t i) const { return parameters[i].data.local[0].item<double>(); }
};

TEST_F(RegisteredRule, StepsWithItsDefaults) {
  Optimizer optimizer(parameters, {.name = "momentum", .lr = 0.25});
  step(optimizer);
  optimizer.set_lr_factor(0.5);
  step(optimizer);
  EXPECT_EQ(value(0), 1 - 0.25 - 0.125 * 1.5);
  EXPECT_FALSE(optimizer.can_skip_on_device());
}

TEST_F(RegisteredRule, TakesItsArgs) {
  Optimizer optimizer(
      parameters,
      {.name = "momentum", .lr = 0.25, .args = std::make_shared<MomentumArgs>(MomentumArgs{0, 2})});
  step(optimizer);
  EXPECT_EQ(value(0), 1);
  step(optimizer);
  EXPECT_EQ(value(0), 0.75);
}

TEST_F(RegisteredRule, GroupsSetItsNumbers) {
  Optimizer optimizer(parameters,
                      {.name = "momentum", .lr = 0.25, .param_groups = {"norm: momentum=0, lr=0.5"}});
  step(optimizer);
  step(optimizer);
  EXPECT_EQ(value(0), 1 - 0.25 - 0.25 * 1.5);
  EXPECT_EQ(value(1), 0);
  try {
    Optimizer(parameters, {.name = "momentum", .param_groups = {"norm: beta1=0", "norm: momentum=1"}});
    FAIL();
  } catch (const ConfigError& error) {
    ASSERT_EQ(error.problems().size(), 2u);
    EXPECT_NE(error.problems()[0].find("known: lr momentum"), std::string::npos) << error.what();
    EXPECT_NE(error.problems()[1].find("momentum must be from 0 to below 1, got '1'"), std::string::npos);
  }
}

TEST_F(RegisteredRule, ItsStateIsNamedAndShared) {
  Optimizer optimizer(parameters, {.name = "momentum"});
  auto state = optimizer.state().find("a.weight")->second;
  ASSERT_EQ(state.size(), 2u);
  EXPECT_EQ(state.at("step").local.item<float>(), 0);
  EXPECT_EQ(state.at("direction").global_shape, (std::vector<int64_t>{2}));
  step(optimizer);
  EXPECT_EQ(state.at("direction").local[0].item<float>(), 1);
  EXPECT_EQ(state.at("step").local.item<float>(), 1);
}

TEST_F(RegisteredRule, UnknownNamesListTheKnownRules) {
  try {
    Optimizer(parameters, {.name = "momentun"});
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("Adam, AdamW, momentum; did you mean 'momentum'?"),
              std::string::npos)
        << error.what();
  }
}

TEST_F(RegisteredRule, KnowsWhichKeysItReads) {
  const OptimizerSpec& spec = optimizers().get("momentum");
  EXPECT_EQ(spec.args.table().fields.size(), 2u);
  EXPECT_EQ(spec.args.unread_keys(),
            (std::vector<std::string>{"beta1", "beta2", "eps", "weight_decay", "implementation",
                                      "state_dtype", "stochastic_rounding"}));
  const OptimizerSpec& adamw = optimizers().get("AdamW");
  EXPECT_TRUE(adamw.args.table().fields.empty());
  EXPECT_TRUE(adamw.args.unread_keys().empty());
}

}  // namespace
}  // namespace titan::optim
