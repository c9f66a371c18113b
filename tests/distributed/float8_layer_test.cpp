// One linear layer in Float8 over several ranks, with a given input and a given gradient of its output. The
// products multiply exactly the same values as on one rank, so results differ only by the order of sums.
// float8_test.cpp tests whole models, where a later cast may round such a difference the other way.

#include <gtest/gtest.h>

#include <map>

#include <ATen/ATen.h>

#include "distributed/float8_units.h"
#include "float8/cast.h"
#include "float8/products.h"
#include "titan/core/error.h"
#include "titan/nn/layers.h"
#include "titan/parallel/fsdp.h"
#include "titan/parallel/parameters.h"
#include "titan/parallel/tensor_parallel.h"

namespace titan {
namespace {

using testing::device;
using testing::world;

// Parts for 2, 3 and 4 ranks are whole blocks of 32 features.
constexpr int64_t kLayerRows = 12, kLayerLength = 24, kFeatures = 384;

class OneLayerImpl : public nn::Module {
 public:
  OneLayerImpl() {
    linear = nn::Linear(kFeatures, kFeatures, nn::LinearOptions{.construct = deferred(device(), at::kFloat)});
    register_module("linear", linear.ptr());
  }
  at::Tensor forward(const at::Tensor& x) {
    check_entered_through_ref();
    return linear(x);
  }
  nn::Linear linear{nullptr};
};
TITAN_MODULE(OneLayer);

// ---- cases

struct Kind {
  std::string name;
  float8::Recipe recipe;
  float8::Arithmetic arithmetic = float8::Arithmetic::Emulated;
  int64_t length = kLayerLength;  ///< a sequence's
};

Kind shipped(const std::string& name) { return {name, float8::recipes().get(name)}; }

// "rowwise" rounds its scales to powers of two; without that, scaling rounds, too.
Kind with_any_scale(const std::string& name) {
  Kind kind = shipped(name);
  kind.name += ", any scale";
  kind.recipe.power_of_two_scales = false;
  return kind;
}

Kind delayed() {
  Kind kind = shipped("tensorwise");
  kind.name += ", delayed";
  kind.recipe.delayed = {.input = true, .weight = true, .grad_output = true, .history_len = 4};
  return kind;
}

// Emulated, and by the device: a GPU with Float8 hardware, or, on one rank, a CPU's product for one scale per
// matrix. On CPUs for which oneDNN has no kernel, that takes minutes with more ranks.
std::vector<Kind> in_all_units(const std::vector<Kind>& kinds) {
  std::vector<Kind> all = kinds;
  for (Kind kind : kinds) {
    const bool cpu_has_it = device().is_cpu() && world().size() == 1 && kind.name == "tensorwise";
    if (!cpu_has_it && testing::arithmetic_of(kind.recipe) == float8::Arithmetic::Emulated) continue;
    kind.name += ", by the device";
    kind.arithmetic = float8::Arithmetic::Hardware;
    all.push_back(kind);
  }
  return all;
}

std::vector<Kind> kinds() {
  return in_all_units({shipped("tensorwise"), shipped("rowwise"), with_any_scale("rowwise"),
                       shipped("rowwise_with_gw_hp"), with_any_scale("rowwise_with_gw_hp"), delayed()});
}

// A device that multiplies blocks reads their scales in tiles of 128 rows. A rank's part of a sequence either ends within one or is
// whole tiles.
std::vector<Kind> kinds_of_blocks() {
  std::vector<Kind> all = in_all_units({shipped("mxfp8_cublas"), shipped("mxfp8_cublas_rceil")});
  if (all.back().arithmetic == float8::Arithmetic::Emulated) return all;
  Kind in_tiles = all.back();
  in_tiles.name += ", whole tiles";
  in_tiles.length = 128 * world().size();
  all.push_back(in_tiles);
  return all;
}

// ---- layouts

struct Form {
  const char* name;
  TensorPlan plan;
  OverlapTransport transport = OverlapTransport::AtOnce;
};

const Form kWhole{"whole", {}};

// Activations are whole between the layers, or split along the sequence, which the layers gather and scatter.
std::vector<Form> forms_in_parts() {
  using Layout = ActivationLayout;
  const Layout whole = Layout::invariant(), sequence = Layout::shard(1), features = Layout::shard(-1);
  std::vector<Form> forms = {{"columns", {{"linear", Colwise{.output = whole}}}},
                             {"rows", {{"linear", Rowwise{.input = whole}}}}};
  for (const auto transport : {OverlapTransport::AtOnce, OverlapTransport::SendReceive}) {
    forms.push_back({"columns of a sequence in parts",
                     {{"", PrepareInput{whole, sequence}},
                      {"linear", Colwise{.input = sequence, .overlap = true}},
                      {"", PrepareOutput{features, whole}}},
                     transport});
    forms.push_back({"rows of a sequence in parts",
                     {{"", PrepareInput{whole, features}},
                      {"linear", Rowwise{.output = sequence, .overlap = true}},
                      {"", PrepareOutput{sequence, whole}}},
                     transport});
  }
  return forms;
}

struct Place {
  int shard = 1, tp = 1;
  Form form = kWhole;
};

std::vector<Place> places() {
  const int size = world().size();
  std::vector<Place> all = {{.shard = size}};
  if (size == 1) return all;
  for (const Form& form : forms_in_parts()) {
    all.push_back({.tp = size, .form = form});
    if (size == 4) all.push_back({.shard = 2, .tp = 2, .form = form});
  }
  return all;
}

// ---- a step

// A random x, or gradient of y, for `step`; the same on every rank.
at::Tensor drawn(uint64_t seed, int step, int64_t length = kLayerLength) {
  at::manual_seed(seed + 100 * static_cast<uint64_t>(step));
  const at::Tensor values = at::randn({kLayerRows, length, kFeatures}) * (step == 0 ? 1.7 : 2.9);
  return values.to(device());
}

struct Result {
  at::Tensor y, grad_x;
};

Result forward_backward(const OneLayer& layer, const at::Tensor& x, const at::Tensor& grad) {
  const at::Tensor leaf = x.clone().requires_grad_();
  const at::Tensor y = layer(leaf);
  y.backward(grad);
  return {y.detach(), leaf.grad()};
}

OneLayer converted(const Kind& kind, const float8::GatherOptions& gather) {
  OneLayer layer;
  layer->linear->set_products(
      float8::products(kind.recipe, kind.arithmetic, ops::default_products(), gather));
  return layer;
}

// The second step may use the first one's scales.
constexpr int kLayerSteps = 2;

struct Reference {
  std::vector<Result> parts;
  at::Tensor grad_weight;
};

// Runs all parts of the batch one by one, because each has its own scales.
Reference on_one_rank(const Kind& kind, int count) {
  const OneLayer layer = converted(kind, {});
  materialize(layer, 7);
  auto scales = float8::DelayedScales::collect({layer.ptr().get()}, 4, device());
  Reference reference;
  for (int step = 0; step < kLayerSteps; ++step) {
    reference.parts.clear();
    layer->linear->weight.mutable_grad().reset();
    const auto x = drawn(1, step, kind.length).chunk(count), grad = drawn(2, step, kind.length).chunk(count);
    for (size_t i = 0; i < x.size(); ++i) reference.parts.push_back(forward_backward(layer, x[i], grad[i]));
    if (!scales.empty()) scales.update([](const at::Tensor& /*pending*/) {});
  }
  reference.grad_weight = layer->linear->weight.grad();
  return reference;
}

double error_of(const at::Tensor& got, const at::Tensor& wanted) {
  return ((got - wanted).norm() / wanted.norm()).item<double>();
}

void expect_products_of(const Reference& wanted, const Kind& kind, const Place& place,
                        const float8::GatherOptions& gather) {
  SCOPED_TRACE(str(kind.name, ", ", place.form.name, ", shard ", place.shard, ", tp ", place.tp,
                   gather.in_float8 ? ", gathered in Float8" : ""));
  const OneLayer layer = converted(kind, gather);
  const auto mesh = DeviceMesh::create(world(), {{"dp_shard", place.shard}, {"tp", place.tp}});
  parallelize(layer, mesh["tp"], place.form.plan, place.form.transport);
  FsdpOptions fsdp;
  fsdp.mesh = mesh["dp_shard"];
  fully_shard(layer, fsdp);
  materialize(layer, 7);
  auto scales = float8::DelayedScales::collect({layer.ptr().get()}, 4, device());
  const Parameter weight = parameters(layer)[0];
  const auto mine = static_cast<size_t>(world().rank() / place.tp);
  Result result;
  for (int step = 0; step < kLayerSteps; ++step) {
    at::Tensor(weight.data.local).mutable_grad().reset();
    result = forward_backward(layer, drawn(1, step, kind.length).chunk(place.shard)[mine],
                              drawn(2, step, kind.length).chunk(place.shard)[mine]);
    if (!scales.empty())
      scales.update([](const at::Tensor& pending) {
        world().everyone()->all_reduce(pending, dist::ReduceOp::Max, {"test::scales"}).wait();
      });
  }
  const double rounding = testing::nearness_of(kind.arithmetic).sums;
  EXPECT_LT(error_of(result.y, wanted.parts[mine].y), rounding);
  EXPECT_LT(error_of(result.grad_x, wanted.parts[mine].grad_x), rounding);
  DTensor grad_weight = weight.data;
  grad_weight.local = weight.data.local.grad();
  EXPECT_LT(error_of(full_tensor(grad_weight), wanted.grad_weight), rounding);
}

void expect_one_ranks_products(const Kind& kind, const std::vector<float8::GatherOptions>& gathers) {
  std::map<int, Reference> references;  // by parts of the batch
  for (const Place& place : places()) {
    if (!references.contains(place.shard)) references[place.shard] = on_one_rank(kind, place.shard);
    for (const float8::GatherOptions& gather : gathers)
      expect_products_of(references[place.shard], kind, place, gather);
  }
}

TEST(Float8Layer, EveryLayoutMultipliesTheSameAsOneRank) {
  for (const Kind& kind : kinds()) expect_one_ranks_products(kind, {{}});
}

TEST(Float8Layer, EveryLayoutMultipliesBlocksTheSameAsOneRank) {
  for (const Kind& kind : kinds_of_blocks()) expect_one_ranks_products(kind, {{}});
}

TEST(Float8Layer, MultipliesTheGatheredWeight) {
  for (const Kind& kind : in_all_units({shipped("tensorwise")}))
    expect_one_ranks_products(kind, {{.in_float8 = true}, {.in_float8 = true, .scales_at_once = true}});
}

// The comparison is precise because scaling by a scale that isn't a power of two rounds, too.
TEST(Float8Layer, ScalesAreNotPowersOfTwo) {
  for (const uint64_t seed : {1, 2}) {
    const at::Tensor matrix = drawn(seed, kLayerSteps - 1).view({-1, kFeatures});
    for (const auto over : {float8::Over::Matrix, float8::Over::Row, float8::Over::Column}) {
      const at::Tensor scale =
          float8::scale_of(float8::amax(matrix, over), at::kFloat8_e4m3fn, /*power_of_two=*/false);
      const at::Tensor exponent = scale.log2();
      EXPECT_GT((exponent - exponent.round()).abs().min().item<double>(), 0);
    }
  }
}

// The comparison detects errors: with the scale of a rank's own part for the whole matrix, results are a
// thousand times further off.
TEST(Float8Layer, AnotherScaleGivesFarOtherResults) {
  const at::Tensor matrix = drawn(1, 0).view({-1, kFeatures});
  const auto values = [&](double factor) {
    const at::Tensor scale = float8::scale_of(float8::amax(matrix, float8::Over::Matrix) * factor,
                                              at::kFloat8_e4m3fn, /*power_of_two=*/false);
    return float8::cast(matrix, scale, at::kFloat8_e4m3fn, /*transposed=*/false).to(at::kFloat) / scale;
  };
  EXPECT_GT(error_of(values(0.9), values(1)), 1000 * testing::Nearness().sums);
}

}  // namespace
}  // namespace titan
