// The memory that Float8 layers with a shared input keep between forward and backward, and their casts with
// activation checkpointing.

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cstring>
#include <optional>
#include <utility>

#include "parallel/activation_checkpoint/budget.h"
#include "titan/float8/convert.h"
#include "titan/nn/containers.h"
#include "unit/golden.h"
#include "unit/parallel/checkpoint_case.h"

namespace titan {
namespace {

using testing::layers_of;
using testing::relative_error;
using testing::small_llama;

// ---- layers that share an input

constexpr int64_t kWidth = 64, kRows = 96;
constexpr int64_t kElements = kWidth * kRows, kScale = 4;

// Three layers with one input, as in attention.
struct ThreeLayers {
  explicit ThreeLayers(const std::string& recipe, const std::vector<std::string>& filter_fqns = {},
                       at::ScalarType dtype = at::kBFloat16) {
    at::manual_seed(3);
    for (int i = 0; i < 3; ++i)
      list.push_back(nn::Linear(kWidth, kWidth, nn::LinearOptions{.construct = {.dtype = dtype}}));
    nn::name_modules(*list.ptr());
    if (recipe.empty()) return;
    const bool delayed = recipe == "delayed";
    float8::convert(*list.ptr(), {.recipe_name = delayed ? "tensorwise" : recipe,
                                  .filter_fqns = filter_fqns,
                                  .arithmetic = float8::Arithmetic::Emulated,
                                  .plain = ops::default_products(),
                                  .delayed = {.input = delayed}});
    scales = float8::DelayedScales::collect({list.ptr().get()}, 4, at::kCPU);
  }
  std::vector<at::Tensor> operator()(const at::Tensor& x) const {
    return nn::linears(x, {&list[0], &list[1], &list[2]});
  }
  std::vector<at::Tensor> apart(const at::Tensor& x) const { return {list[0](x), list[1](x), list[2](x)}; }

  nn::ModuleList<nn::Linear> list;
  float8::DelayedScales scales = float8::DelayedScales::collect({}, 1, at::kCPU);
};

at::Tensor drawn_input(at::ScalarType dtype = at::kBFloat16) {
  at::manual_seed(5);
  return at::randn({kRows, kWidth}).to(dtype).requires_grad_();
}

int64_t saved_bytes(const ThreeLayers& layers) {
  const at::Tensor x = drawn_input();
  activations::SavedBytes saved(*layers.list.ptr());
  const activations::HooksScope counting(&saved);
  layers(x);
  return saved.total();
}

TEST(Float8Saving, LayersOfOneRecipeKeepOneCast) {
  EXPECT_EQ(saved_bytes(ThreeLayers("")), 2 * kElements);
  EXPECT_EQ(saved_bytes(ThreeLayers("tensorwise")), kElements + kScale);
  EXPECT_EQ(saved_bytes(ThreeLayers("rowwise")), kElements + kWidth * kScale);
  EXPECT_EQ(saved_bytes(ThreeLayers("rowwise_with_gw_hp")), 2 * kElements);
  EXPECT_EQ(saved_bytes(ThreeLayers("mxfp8_cublas")), kElements + kElements / 32);
}

// A layer that the filter leaves in high precision keeps the input itself; the others cast it again.
TEST(Float8Saving, AFilteredLayersInputIsKeptOnce) {
  for (const char* filtered : {"0", "1", "2"}) {
    EXPECT_EQ(saved_bytes(ThreeLayers("tensorwise", {filtered})), 2 * kElements + kScale) << filtered;
    for (const char* recipe : {"rowwise", "rowwise_with_gw_hp", "mxfp8_cublas"})
      EXPECT_EQ(saved_bytes(ThreeLayers(recipe, {filtered})), 2 * kElements) << recipe << " " << filtered;
  }
}

TEST(Float8Saving, LayersWithSeparateScalesKeepTheInputOnce) {
  EXPECT_EQ(saved_bytes(ThreeLayers("delayed")), 2 * kElements + 3 * kScale);
}

TEST(Float8Saving, AFrozenLayersInputIsNotKept) {
  const ThreeLayers filtered("tensorwise", {"1"});
  filtered.list[1]->weight.set_requires_grad(false);
  EXPECT_EQ(saved_bytes(filtered), kElements + kScale);
  for (const size_t i : {0, 2}) filtered.list[i]->weight.set_requires_grad(false);
  EXPECT_EQ(saved_bytes(filtered), 0);
}

// Each layer called separately gives the same bits; x's gradient is summed in another order.
TEST(Float8Saving, LayersTogetherEqualSeparateLayers) {
  for (const char* recipe : {"tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8_cublas", "delayed"}) {
    const std::vector<std::vector<std::string>> filters = {{}, {"0"}, {"1"}};
    for (const auto& filter : filters) {
      ThreeLayers layers(recipe, filter, at::kFloat);
      const at::Tensor x = drawn_input(at::kFloat);
      std::vector<std::vector<at::Tensor>> results;
      for (const bool together : {true, false}) {
        const std::vector<at::Tensor> y = together ? layers(x) : layers.apart(x);
        std::vector<at::Tensor> grads;
        for (const at::Tensor& each : y) grads.push_back(each.detach().sin());
        std::vector<at::Tensor> inputs = layers.list.ptr()->parameters();
        inputs.push_back(x);
        results.push_back(torch::autograd::grad(y, inputs, grads));
        results.back().insert(results.back().end(), y.begin(), y.end());
      }
      for (size_t i = 0; i < results[0].size(); ++i) {
        if (i == 3) {
          EXPECT_LT(relative_error(results[0][i], results[1][i]), 1e-6) << recipe;
        } else {
          EXPECT_TRUE(at::equal(results[0][i], results[1][i])) << recipe << " " << i;
        }
      }
    }
  }
}

// ---- casts under activation checkpointing

// Counts casts on this thread, except those on the meta device.
class CastCounter {
 public:
  CastCounter()
      : handle_(at::addThreadLocalCallback(at::RecordFunctionCallback(nullptr, &CastCounter::note)
                                               .needsOutputs(true)
                                               .scopes({at::RecordScope::FUNCTION}))) {
    count_ = 0;
  }
  ~CastCounter() { at::removeCallback(handle_); }
  CastCounter(const CastCounter&) = delete;
  CastCounter& operator=(const CastCounter&) = delete;
  static int take() { return std::exchange(count_, 0); }

 private:
  static void note(const at::RecordFunction& call, at::ObserverContext* /*context*/) {
    const bool casts = std::strcmp(call.name(), "titan::float8_cast") == 0 ||
                       std::strcmp(call.name(), "titan::float8_cast_blocks") == 0;
    if (casts && !call.outputs()[0].toTensor().is_meta()) ++count_;
  }
  inline static thread_local int count_ = 0;
  at::CallbackHandle handle_;
};

struct Casts {
  int forward = 0, backward = 0;
};

// The number of casts in one Llama block.
Casts casts_of(const std::string& recipe, const std::optional<LayersPolicy>& policy,
               bool with_gradients = true) {
  models::Llama3Args args = small_llama(1);
  args.n_heads = 1;
  args.n_kv_heads = 1;  // blocks of 32 features
  models::Llama3 model(args);
  nn::name_modules(*model);
  float8::convert(
      *model.ptr(),
      {.recipe_name = recipe, .arithmetic = float8::Arithmetic::Emulated, .plain = ops::default_products()});
  if (policy) checkpoint_activations(layers_of(model), *policy);
  const at::Tensor x = at::randn({2, 16, 32}).requires_grad_();
  const CastCounter counter;
  const at::AutoGradMode mode(with_gradients);
  const at::Tensor y = model->layers[0](x);
  Casts casts{.forward = CastCounter::take()};
  if (with_gradients) y.sum().backward();
  casts.backward = CastCounter::take();
  return casts;
}

// One cast each for the input of wq, wk and wv, the input of wo, the input of w1 and w3, and the input of w2,
// which is recomputed.
constexpr int kInputs = 4, kWeights = 7, kKept = 3;

TEST(Float8Checkpointing, AForwardCastsOnlyWhatItMultiplies) {
  for (const char* recipe : {"tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8_cublas"}) {
    const bool keeps_casts = std::string(recipe) != "rowwise_with_gw_hp";
    EXPECT_EQ(casts_of(recipe, {}, /*with_gradients=*/false).forward, kInputs + kWeights) << recipe;
    EXPECT_EQ(casts_of(recipe, {}).forward, kInputs + kWeights + (keeps_casts ? kKept : 0)) << recipe;
    for (const LayersPolicy& policy : {LayersPolicy(FullRecompute{}), LayersPolicy(SelectiveOp{})})
      EXPECT_EQ(casts_of(recipe, policy).forward, kInputs + kWeights) << recipe << " " << policy.index();
  }
}

// A recompute casts the operands that it multiplies or keeps. It doesn't cast the operands of w2, because it
// ends before that product, or the weights of kept products (wq, wv, w1).
TEST(Float8Checkpointing, ARecomputeCastsOnlyWhatItMultiplies) {
  for (const char* recipe : {"tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8_cublas"}) {
    const int kept = std::string(recipe) != "rowwise_with_gw_hp" ? kKept : 0;
    const int none = casts_of(recipe, {}).backward;
    EXPECT_EQ(casts_of(recipe, FullRecompute{}).backward - none, (kInputs - 1) + (kWeights - 1) + kept)
        << recipe;
    EXPECT_EQ(casts_of(recipe, SelectiveOp{}).backward - none, (kInputs - 1) + (kWeights - 4) + kept)
        << recipe;
  }
}

}  // namespace
}  // namespace titan
