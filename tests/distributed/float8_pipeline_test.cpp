// Compares a Llama in Float8, cut into pipeline stages with FSDP and tensor parallelism, with one rank: for
// every recipe, with weights gathered in Float8, delayed weight gradients, activation checkpoints and frozen
// weights. float8_layer_test.cpp tests a single layer.

#include <gtest/gtest.h>

#include <map>
#include <utility>

#include "distributed/float8_units.h"
#include "distributed/pipeline_case.h"
#include "distributed/recorded_calls.h"
#include "titan/float8/convert.h"

namespace titan {
namespace {

using namespace titan::testing;  // NOLINT: the test's own names

// Parts for 2 ranks are whole blocks of 32 features. Counting embedding and head, each of 8 stages has one
// layer.
LlamaCase blocky_llama() {
  LlamaCase llama = mini_llama();
  llama.name = "blocky";
  llama.args["n_layers"] = int64_t{6};
  llama.args["n_kv_heads"] = int64_t{4};
  llama.seq_len = 16;
  return llama;
}

struct Case {
  std::string recipe = "tensorwise";  ///< "delayed": all three scales are from the previous step
  bool gathered = false;              ///< weights are sent in Float8
  bool frozen = false;
  bool scales_at_once = false;  ///< for gathered weights
};

const std::vector<Case> kCases = {{"tensorwise"},
                                  {"tensorwise", /*gathered=*/true},
                                  {"tensorwise", /*gathered=*/true, /*frozen=*/true},
                                  {"rowwise"},
                                  {"rowwise_with_gw_hp"},
                                  {"mxfp8_cublas"},
                                  {"delayed"}};

// A whole layer, and single weights of other layers: one of three that share an input, and one that
// multiplies a recomputed input.
bool is_frozen(const std::string& name) {
  return name.starts_with("layers.1.") || name == "layers.0.attention.wk.weight" ||
         name == "layers.2.feed_forward.w2.weight";
}

void convert(torch::nn::Module& model, const Case& c) {
  const bool delayed = c.recipe == "delayed";
  float8::convert(model, {.recipe_name = delayed ? "tensorwise" : c.recipe,
                          .arithmetic = arithmetic_of(c.recipe),
                          .plain = ops::default_products(),
                          .delayed = {.input = delayed, .weight = delayed, .grad_output = delayed},
                          .gather = {.in_float8 = c.gathered, .scales_at_once = c.scales_at_once}});
  if (!c.frozen) return;
  for (auto& named : model.named_parameters())
    if (is_frozen(named.key())) named.value().set_requires_grad(false);
}

// The second step may use the first one's scales.
constexpr int kSteps = 2;

void collect_gradients(const std::vector<Parameter>& parameters, Outcome& outcome) {
  for (const Parameter& parameter : parameters)
    if (parameter.data.local.requires_grad())
      outcome.gradients[parameter.name] = full_gradient(parameter).clone();
}

void forget_gradients_of(const std::vector<Parameter>& parameters) {
  for (const Parameter& parameter : parameters) at::Tensor(parameter.data.local).mutable_grad().reset();
}

// Runs all ranks' micro-batches one by one, because activations have their own scales in each.
Outcome on_one_rank(const LlamaCase& llama, const Batch& batch, const Case& c, int micro_batches) {
  auto model = build_llama(llama, at::kFloat);
  convert(model->root().module(), c);
  fully_shard(model->root(), fsdp_options(kFloat32));
  materialize(model->root(), kSeed);
  auto scales = float8::DelayedScales::collect({&model->root().module()}, 16, device());
  Outcome outcome;
  for (int step = 0; step < kSteps; ++step) {
    forget_gradients_of(parameters(model->root()));
    outcome.loss = forward_backward(*model, batch, 0, 1, micro_batches);
    if (!scales.empty()) scales.update([](const at::Tensor& /*pending*/) {});
  }
  collect_gradients(parameters(model->root()), outcome);
  return outcome;
}

// This rank's stages. Layers gather their operands, as in a Float8 run.
class StagedRun {
 public:
  StagedRun(const LlamaCase& llama, const Batch& batch, const Case& c, const Variant& variant)
      : num_valid_(batch.num_valid()),
        meshes_(train::build_meshes(world(), variant.dims)),
        stages_(llama, kFloat32, variant, meshes_,
                {.tensor = {.overlap = variant.dims.tp > 1, .transport = OverlapTransport::AtOnce},
                 .convert = [&](torch::nn::Module& model) { convert(model, c); }}),
        scales_(float8::DelayedScales::collect(stages_.roots(), 16, device())),
        runner_(stages_.stages(), meshes_.pp, device()),
        micro_batches_(micro_batches_of(batch.rows(meshes_.dp_rank(), meshes_.dp_degree()),
                                        variant.num_micro_batches())),
        plan_(runner_.plan(stages_.schedule(), boundaries_of(llama, kFloat32, variant,
                                                             micro_batches_.front().input_BS.size(0)))) {}

  /// This rank's part of the loss.
  double step() {
    forget_gradients_of(stages_.parameters());
    const double loss = runner_.run(plan_, micro_batches_, num_valid_).item<double>();
    if (!scales_.empty())
      scales_.update([&](const at::Tensor& pending) {
        meshes_.stage.group()->all_reduce(pending, dist::ReduceOp::Max, {"test::scales"}).wait();
      });
    return loss;
  }
  const train::Meshes& meshes() const { return meshes_; }
  Stages& stages() { return stages_; }

 private:
  int64_t num_valid_;
  train::Meshes meshes_;
  Stages stages_;
  float8::DelayedScales scales_;
  train::PipelineRunner runner_;
  std::vector<data::Batch> micro_batches_;
  train::StepPlan plan_;
};

Outcome in_stages(const LlamaCase& llama, const Batch& batch, const Case& c, const Variant& variant) {
  StagedRun run(llama, batch, c, variant);
  Outcome outcome;
  for (int step = 0; step < kSteps; ++step) outcome.loss = run.step();
  outcome.loss = run.meshes().loss.group()->sum(outcome.loss, {.phase = "test::loss"});
  collect_gradients(run.stages().parameters(), outcome);
  return outcome;
}

struct Place {
  train::ParallelDims dims;
  const char* schedule;
  int stages;
};

// The second schedule delays weight gradients.
std::vector<Place> places() {
  std::vector<train::ParallelDims> all = {{.pp = 2}};
  if (world().size() == 4) all = {{.dp_shard = 2, .pp = 2}, {.tp = 2, .pp = 2}, {.pp = 4}};
  if (world().size() == 8) all = {{.dp_shard = 2, .tp = 2, .pp = 2}};
  std::vector<Place> places;
  for (const train::ParallelDims& dims : all) {
    places.push_back({dims, "1F1B", dims.pp});
    places.push_back({dims, "ZBVZeroBubble", 2 * dims.pp});
  }
  return places;
}

std::string name_of(const Case& c, const Variant& variant) {
  return str(c.recipe, c.gathered ? " gathered" : "", c.frozen ? " frozen" : "", " ",
             testing::name_of(variant));
}

TEST(Float8Pipeline, StagesMatchOneRank) {
  LlamaCase llama = blocky_llama();
  std::map<std::pair<size_t, int>, Outcome> on_one;  // by case and parts of the batch: layouts share them
  for (const Place& place : places()) {
    Variant variant{place.dims, place.schedule, place.stages, 2 * place.dims.pp};
    const int parts = place.dims.batch_degree() * variant.num_micro_batches();
    llama.rows = 2 * parts;
    const Batch batch = random_batch(llama, 1);
    for (size_t i = 0; i < kCases.size(); ++i) {
      const Case& c = kCases[i];
      SCOPED_TRACE(name_of(c, variant));
      if (!on_one.contains({i, parts})) on_one[{i, parts}] = on_one_rank(llama, batch, c, parts);
      const Outcome& wanted = on_one[{i, parts}];
      const Outcome got = in_stages(llama, batch, c, variant);
      const Nearness nearness = nearness_of(arithmetic_of(c.recipe));
      EXPECT_NEAR(got.loss, wanted.loss, nearness.loss * wanted.loss);
      EXPECT_FALSE(got.gradients.empty());
      for (const auto& [name, gradient] : got.gradients)
        EXPECT_LT(relative_error(gradient, wanted.gradients.at(name)), nearness.gradients) << name;
    }
  }
}

// This holds for each stage of a rank, with any number and order of micro-batches, because weights are
// gathered once per step. With tensor parallelism there is also one reduction over that axis; the second
// step, without gathers, shows how many are for activations.
TEST(Float8Pipeline, StageScalesTakeOnePassAndOneReductionPerAxisAndStep) {
  if (world().size() == 2) GTEST_SKIP() << "needs a shard axis besides the stages";
  LlamaCase llama = blocky_llama();
  for (const Place& place : places()) {
    if (place.dims.dp_shard == 1) continue;
    Variant variant{place.dims, place.schedule, place.stages, 2 * place.dims.pp};
    llama.rows = 2 * place.dims.batch_degree() * variant.num_micro_batches();
    const Case c{.gathered = true, .scales_at_once = true};
    SCOPED_TRACE(name_of(c, variant));
    StagedRun run(llama, random_batch(llama, 1), c, variant);
    const size_t num_stages = run.stages().stages().size();
    size_t of_activations = 0;
    for (const bool written : {true, false, true}) {
      size_t passes = 0, over_shards = 0, over_parts = 0;
      {
        const OperationWatch watch([&](const std::string& name, const auto& /*outputs*/) {
          passes += name == "titan::float8_amax_many";
        });
        over_parts = calls_of(ops::kScalesPhase, [&] {
                       over_shards = calls_of("fsdp::float8_scales", [&] { run.step(); }).size();
                     }).size();
      }
      EXPECT_EQ(passes, written ? num_stages : 0);
      EXPECT_EQ(over_shards, written ? num_stages : 0);
      const size_t of_weights = written && place.dims.tp > 1 ? num_stages : 0;
      if (of_activations == 0) of_activations = over_parts - of_weights;
      EXPECT_EQ(over_parts, of_weights + of_activations);
      EXPECT_EQ(of_activations > 0, place.dims.tp > 1);
      if (written) continue;
      at::NoGradGuard no_grad;
      for (const Parameter& parameter : run.stages().parameters()) at::Tensor(parameter.data.local).mul_(0.9);
    }
  }
}

TEST(Float8Pipeline, RecomputingActivationsChangesNoBit) {
  LlamaCase llama = blocky_llama();
  for (const Place& place : places()) {
    Variant variant{place.dims, place.schedule, place.stages, 2 * place.dims.pp};
    llama.rows = 2 * place.dims.batch_degree() * variant.num_micro_batches();
    const Batch batch = random_batch(llama, 1);
    for (const Case& c : kCases) {
      variant.checkpointing = 0;
      const Outcome wanted = in_stages(llama, batch, c, variant);
      for (variant.checkpointing = 1; variant.checkpointing < std::size(kCheckpointing);
           ++variant.checkpointing) {
        SCOPED_TRACE(name_of(c, variant));
        const Outcome got = in_stages(llama, batch, c, variant);
        EXPECT_EQ(got.loss, wanted.loss);
        ASSERT_EQ(got.gradients.size(), wanted.gradients.size());
        for (const auto& [name, gradient] : wanted.gradients)
          EXPECT_TRUE(at::equal(got.gradients.at(name), gradient)) << name;
      }
    }
  }
}

}  // namespace
}  // namespace titan
