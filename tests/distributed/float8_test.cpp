// Layers in Float8 under FSDP and tensor parallelism, beside one rank's, with activation checkpoints and
// frozen weights too. And what travels. A layer by itself: float8_layer_test.cpp; pipelines:
// float8_pipeline_test.cpp.

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include <cstring>
#include <map>
#include <optional>

#include "distributed/world.h"
#include "parallel/fsdp/fsdp_state.h"
#include "titan/core/error.h"
#include "titan/dist/flight_record.h"
#include "titan/float8/cast.h"
#include "titan/float8/convert.h"
#include "titan/float8/delayed_scales.h"
#include "titan/nn/containers.h"
#include "titan/nn/feed_forward.h"
#include "titan/nn/rms_norm.h"
#include "titan/parallel/activation_checkpoint.h"
#include "titan/parallel/fsdp.h"
#include "titan/parallel/parameters.h"
#include "titan/parallel/tensor_parallel.h"

namespace titan {
namespace {

using testing::device;
using testing::world;

// Parts of 2 and 4 ranks are whole blocks of 32 features.
constexpr int64_t kDim = 32, kHidden = 128, kRows = 8, kLength = 16;
constexpr int kBlocks = 3;

// [Note: roundings that flip]
// What a layer multiplies is one rank's to the bit as long as its input is (float8_layer_test.cpp). But sums
// in another order differ in fp32's last bits, and now and then a later layer's cast rounds such a value the
// other way: by up to an eighth of it in e4m3, a quarter in e5m2. One such value of a matrix of 4096 (a
// weight here, or a rank's activations) moves a gradient by some 1/8 / sqrt(4096) = 2e-3 of its norm.
constexpr double kFlips = 1e-2;

nn::Construct deferred_here() { return deferred(device(), at::kFloat); }

// `mixed`: with a norm and a linear layer in high precision beside those in Float8.
class StackBlockImpl : public nn::Module {
 public:
  explicit StackBlockImpl(bool mixed) {
    const nn::Init init = nn::Init::truncated_normal(0.2, -2, 2);
    if (mixed) {
      norm = nn::RMSNorm(kDim, 1e-5, deferred_here());
      register_module("norm", norm.ptr());
    }
    feed_forward = nn::FeedForward(nn::FeedForwardOptions{.dim = kDim,
                                                          .hidden_dim = kHidden,
                                                          .gate_init = init,
                                                          .output_init = init,
                                                          .construct = deferred_here()});
    register_module("feed_forward", feed_forward.ptr());
    if (mixed) {
      plain = nn::Linear(kDim, kDim, nn::LinearOptions{.construct = deferred_here()});
      register_module("plain", plain.ptr());
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    check_entered_through_ref();
    if (norm.is_empty()) return x + feed_forward(x);
    const at::Tensor h = x + feed_forward(norm(x));
    return h + plain(h);
  }
  nn::RMSNorm norm{nullptr};
  nn::FeedForward feed_forward{nullptr};
  nn::Linear plain{nullptr};
};
TITAN_MODULE(StackBlock);

class StackImpl : public nn::Module {
 public:
  explicit StackImpl(bool mixed) {
    for (int i = 0; i < kBlocks; ++i) blocks.push_back(StackBlock(mixed));
    register_module("blocks", blocks.ptr());
  }
  at::Tensor forward(const at::Tensor& x) {
    check_entered_through_ref();
    at::Tensor h = x;
    for (const StackBlock& block : blocks) h = block(h);
    return h;
  }
  nn::ModuleList<StackBlock> blocks;
};
TITAN_MODULE(Stack);

const Colwise kColumns{.input = ActivationLayout::replicate()};
const TensorPlan kPlan = {
    {"blocks.*.feed_forward.w1", kColumns},
    {"blocks.*.feed_forward.w3", kColumns},
    {"blocks.*.feed_forward.w2", Rowwise{}},
    {"blocks.*.feed_forward", PrepareInput{ActivationLayout::invariant(), ActivationLayout::replicate()}}};
// Of each group's weights the first alone is cut.
const TensorPlan kFirstWeightAlone = {
    {"blocks.*.feed_forward.w1", Colwise{.output = ActivationLayout::invariant()}}};

// The stream in parts of the sequence; for a block with a norm.
TensorPlan sequence_plan() {
  const auto sequence = ActivationLayout::shard(1), whole = ActivationLayout::invariant();
  const Colwise columns{.input = sequence, .overlap = true};
  return {{"", PrepareInput{whole, sequence}},
          {"", PrepareOutput{sequence, whole}},
          {"blocks.*.norm", SequenceParallel{}},
          {"blocks.*.plain", SequenceParallel{}},
          {"blocks.*.feed_forward.w1", columns},
          {"blocks.*.feed_forward.w3", columns},
          {"blocks.*.feed_forward.w2", Rowwise{.output = sequence, .overlap = true}}};
}

struct Layout {
  int replicate = 1, shard = 1, tp = 1;
  TensorPlan plan = kPlan;
  OverlapTransport transport = OverlapTransport::AtOnce;
};

std::vector<Layout> layouts() {
  const int size = world().size();
  std::vector<Layout> all = {{.shard = size}};
  if (size == 2 || size == 4) all.push_back({.tp = size});
  if (size == 4) all.insert(all.end(), {{.shard = 2, .tp = 2}, {.replicate = 2, .shard = 2}});
  return all;
}

// "delayed": tensorwise with all three scales of the step before.
const std::vector<std::string> kRecipes = {"tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8_cublas",
                                           "delayed"};

struct Case {
  std::string recipe = "tensorwise";
  Layout layout = {};
  float8::GatherOptions gather = {};
  FsdpOptions fsdp = {};
  bool mixed = false;
  bool frozen = false;  ///< single weights of two blocks, and all of the last
  std::optional<LayersPolicy> checkpoint = std::nullopt;
  float8::Arithmetic arithmetic = float8::Arithmetic::Emulated;
};

struct Spread {
  Stack model;
  DeviceMesh data;
};

void convert(Stack& model, const std::string& recipe, float8::Arithmetic arithmetic,
             const float8::GatherOptions& gather = {}) {
  const bool delayed = recipe == "delayed";
  float8::convert(*model.ptr(), {.recipe_name = delayed ? "tensorwise" : recipe,
                                 .filter_fqns = {"plain"},
                                 .arithmetic = arithmetic,
                                 .plain = ops::default_products(),
                                 .delayed = {.input = delayed, .weight = delayed, .grad_output = delayed},
                                 .gather = gather});
}

void freeze(Stack& model) {
  model->blocks[0]->feed_forward->w1->weight.set_requires_grad(false);
  model->blocks[1]->feed_forward->w2->weight.set_requires_grad(false);
  for (at::Tensor& parameter : model->blocks[kBlocks - 1]->parameters()) parameter.set_requires_grad(false);
}

Spread make(const Case& c) {
  Stack model(c.mixed);
  if (c.frozen) freeze(model);
  convert(model, c.recipe, c.arithmetic, c.gather);
  const auto mesh = DeviceMesh::create(
      world(), {{"dp_replicate", c.layout.replicate}, {"dp_shard", c.layout.shard}, {"tp", c.layout.tp}});
  parallelize(model, mesh["tp"], c.layout.plan, c.layout.transport);
  if (c.checkpoint) checkpoint_activations({model->blocks.begin(), model->blocks.end()}, *c.checkpoint);
  FsdpOptions options = c.fsdp;
  options.mesh = mesh({"dp_replicate", "dp_shard"});
  for (const StackBlock& block : model->blocks) fully_shard(block, options);
  fully_shard(model, options);
  materialize(model, 7);
  return {model, options.mesh};
}

at::Tensor global_batch() {
  at::manual_seed(11);
  return at::randn({kRows, kLength, kDim}).to(device());
}

at::Tensor loss_of(const Stack& model, const at::Tensor& x) { return model(x).pow(2).sum(); }

// The second step gathers by the first one's order, and reads its magnitudes where scales are delayed.
constexpr int kSteps = 2;

struct Outcome {
  double loss = 0;                              // of all ranks
  std::map<std::string, at::Tensor> gradients;  // whole; of frozen parameters undefined
};

// The micro-batches of all ranks one by one on each rank: the scales of activations are theirs.
Outcome one_ranks(const Case& c, int parts) {
  Stack model(c.mixed);
  if (c.frozen) freeze(model);
  convert(model, c.recipe, c.arithmetic);
  materialize(model, 7);
  auto scales = float8::DelayedScales::collect({model.ptr().get()}, 16, device());
  Outcome outcome;
  for (int step = 0; step < kSteps; ++step) {
    model->zero_grad();
    outcome.loss = 0;
    for (const at::Tensor& part : global_batch().chunk(parts)) {
      const at::Tensor loss = loss_of(model, part);
      loss.backward();
      outcome.loss += loss.item<double>();
    }
    if (!scales.empty()) scales.update([](const at::Tensor& /*pending*/) {});
  }
  for (const auto& named : model->named_parameters()) outcome.gradients[named.key()] = named.value().grad();
  return outcome;
}

Outcome spread_out(const Case& c) {
  const Spread spread = make(c);
  auto scales = float8::DelayedScales::collect({spread.model.ptr().get()}, 16, device());
  const int parts = c.layout.replicate * c.layout.shard;
  const auto mine = static_cast<size_t>(world().rank() / c.layout.tp);
  at::Tensor loss;
  for (int step = 0; step < kSteps; ++step) {
    for (const Parameter& parameter : parameters(spread.model)) parameter.data.local.mutable_grad().reset();
    loss = loss_of(spread.model, global_batch().chunk(parts)[mine]);
    loss.backward();
    if (!scales.empty())
      scales.update([](const at::Tensor& pending) {
        world().everyone()->all_reduce(pending, dist::ReduceOp::Max, {"test::scales"}).wait();
      });
  }
  at::Tensor sum = loss.detach().to(at::kDouble).view({1});
  world().everyone()->all_reduce(sum, dist::ReduceOp::Sum, {"test::loss"}).wait();
  Outcome outcome{sum.item<double>() / c.layout.tp, {}};
  for (const Parameter& parameter : parameters(spread.model)) {
    DTensor gradient = parameter.data;
    gradient.local = parameter.data.local.grad();
    outcome.gradients[parameter.name] = gradient.local.defined() ? full_tensor(gradient) : at::Tensor();
  }
  return outcome;
}

std::string name_of(const Case& c) {
  return str(c.recipe, " replicate ", c.layout.replicate, " shard ", c.layout.shard, " tp ", c.layout.tp,
             c.gather.in_float8 ? " gathered in Float8" : "", c.mixed ? " mixed" : "",
             c.frozen ? " frozen" : "");
}

double error_of(const at::Tensor& got, const at::Tensor& wanted) {
  return ((got - wanted).norm() / wanted.norm()).item<double>();
}

void expect_one_ranks(const Case& c) {
  SCOPED_TRACE(name_of(c));
  const Outcome got = spread_out(c), wanted = one_ranks(c, c.layout.replicate * c.layout.shard);
  EXPECT_NEAR(got.loss, wanted.loss, 1e-4 * wanted.loss);
  for (const auto& [name, gradient] : got.gradients) {
    ASSERT_EQ(gradient.defined(), wanted.gradients.at(name).defined()) << name;
    if (!gradient.defined()) continue;
    EXPECT_LT(error_of(gradient, wanted.gradients.at(name)), kFlips) << name;
  }
}

// The calls of `run`, by phase.
template <class Run>
std::vector<dist::CallRecord> calls_of(const char* phase, const Run& run) {
  const uint64_t before = world().recorder().num_calls();
  run();
  std::vector<dist::CallRecord> calls;
  for (const dist::CallRecord& call : world().recorder().snapshot())
    if (call.number >= before && std::strcmp(call.phase, phase) == 0) calls.push_back(call);
  return calls;
}

int64_t gathered_bytes(const Spread& spread) {
  at::NoGradGuard no_grad;
  int64_t sum = 0;
  for (const auto& call : calls_of("fsdp::all_gather", [&] { spread.model(global_batch()); }))
    sum += call.bytes;
  return sum;
}

// Of [rows, columns] over the ranks: chunks of whole rows, to multiples of 16 elements.
int64_t padded(int64_t rows, int64_t columns) {
  const int64_t ranks = world().size(), chunk = (rows + ranks - 1) / ranks * columns;
  return ranks * ((chunk + 15) / 16 * 16);
}

TEST(Float8, EveryLayoutHasOneRanksGradients) {
  for (const std::string& recipe : kRecipes)
    for (const Layout& layout : layouts()) expect_one_ranks({.recipe = recipe, .layout = layout});
}

TEST(Float8, GatheredInFloat8LossAndGradientsAreOneRanks) {
  for (const Layout& layout : layouts())
    for (const bool at_once : {false, true})
      for (const ReshardAfterForward& reshard : {ReshardAfterForward::always(), ReshardAfterForward::never()})
        expect_one_ranks({.layout = layout,
                          .gather = {.in_float8 = true, .scales_at_once = at_once},
                          .fsdp = {.reshard_after_forward = reshard},
                          .mixed = at_once});
}

// Also where they share a gather, a cast of their input or a node of the graph with others that learn.
TEST(Float8, FrozenWeightsLeaveOneRanksGradients) {
  for (const Layout& layout : layouts()) {
    for (const std::string& recipe : kRecipes)
      expect_one_ranks({.recipe = recipe, .layout = layout, .mixed = true, .frozen = true});
    for (const bool at_once : {false, true})
      expect_one_ranks({.layout = layout,
                        .gather = {.in_float8 = true, .scales_at_once = at_once},
                        .mixed = at_once,
                        .frozen = true});
  }
}

// In every recipe and gathered in Float8, with a sequence in parts where ranks share one.
TEST(Float8, RecomputingActivationsChangesNoBit) {
  std::vector<Case> cases;
  for (const Layout& layout : layouts()) {
    for (const std::string& recipe : kRecipes) cases.push_back({.recipe = recipe, .layout = layout});
    cases.push_back({.layout = layout, .gather = {.in_float8 = true}, .mixed = true, .frozen = true});
    if (layout.tp == 1) continue;
    Layout in_parts = layout;
    in_parts.plan = sequence_plan();
    for (const std::string& recipe : kRecipes)
      cases.push_back({.recipe = recipe,
                       .layout = in_parts,
                       .gather = {.in_float8 = recipe == "tensorwise"},
                       .mixed = true});
  }
  for (Case& c : cases) {
    SCOPED_TRACE(name_of(c));
    const Outcome wanted = spread_out(c);
    for (const LayersPolicy& policy : {LayersPolicy(FullRecompute{}), LayersPolicy(SelectiveOp{})}) {
      c.checkpoint = policy;
      const Outcome got = spread_out(c);
      EXPECT_EQ(got.loss, wanted.loss) << policy.index();
      for (const auto& [name, gradient] : wanted.gradients) {
        if (!gradient.defined()) continue;
        EXPECT_TRUE(at::equal(got.gradients.at(name), gradient)) << policy.index() << " " << name;
      }
    }
  }
}

// A CPU has a product of matrices with one scale each, which wants its operands as a GPU's units do: also of
// bytes that were gathered, turned for the backward.
TEST(Float8, ProductsOfTheProcessorHaveOneRanksLossAndGradients) {
  for (const Layout& layout : layouts())
    for (const bool in_float8 : {false, true})
      expect_one_ranks({.layout = layout,
                        .gather = {.in_float8 = in_float8},
                        .mixed = true,
                        .arithmetic = float8::Arithmetic::Hardware});
}

// Activations are gathered by the layers that multiply them, in one collective or part by part.
TEST(Float8, ASequenceInPartsHasOneRanksLossAndGradients) {
  const int size = world().size();
  if (size == 3) GTEST_SKIP() << "hidden features don't divide by 3 x 16";
  for (const auto transport : {OverlapTransport::AtOnce, OverlapTransport::SendReceive})
    for (const std::string& recipe : kRecipes) {
      expect_one_ranks({.recipe = recipe,
                        .layout = {.tp = size, .plan = sequence_plan(), .transport = transport},
                        .mixed = true});
      if (size == 4)
        expect_one_ranks({.recipe = recipe,
                          .layout = {.shard = 2, .tp = 2, .plan = sequence_plan(), .transport = transport},
                          .gather = {.in_float8 = recipe == "tensorwise"},
                          .mixed = true});
    }
}

// Of a block's two: of an input and of a gradient.
int64_t num_narrow_gathers(const std::string& recipe) {
  if (recipe == "tensorwise") return 2 * kBlocks;
  return recipe == "delayed" ? kBlocks : 0;
}

// w1 and w3 share a gather of their input, and w2's gradient is gathered in the backward: a byte an element
// where one cast serves all that multiply it. (Delayed, w1 and w3 have scales of their own.) What is summed
// stays in bf16.
TEST(Float8, ActivationsTravelAsBytes) {
  if (world().size() != 2) GTEST_SKIP() << "takes two ranks";
  for (const std::string& recipe : kRecipes) {
    SCOPED_TRACE(recipe);
    const Spread spread = make({.recipe = recipe,
                                .layout = {.tp = 2, .plan = sequence_plan()},
                                .fsdp = {.param_dtype = at::kBFloat16},
                                .mixed = true});
    const int64_t elements = kRows * kLength * kDim, wide = 2 * elements;
    const auto step = [&] { loss_of(spread.model, global_batch().to(at::kBFloat16)).backward(); };
    int64_t gathers = 0, scatters = 0;
    int64_t narrow = 0;
    for (const auto& call : calls_of("tp::gather", step)) {
      EXPECT_TRUE(call.bytes == elements || call.bytes == wide) << call.bytes;
      narrow += call.bytes == elements;
      ++gathers;
    }
    EXPECT_EQ(narrow, num_narrow_gathers(recipe));
    for (const auto& call : calls_of("tp::reduce_scatter", step)) {
      EXPECT_EQ(call.bytes, wide);
      ++scatters;
    }
    EXPECT_EQ(gathers, 2 * kBlocks);
    EXPECT_EQ(scatters, 2 * kBlocks);
  }
}

// Asynchronous: the same bytes, a rank's part in each message.
TEST(Float8, PartsOfActivationsTravelAsBytes) {
  if (world().size() != 2) GTEST_SKIP() << "takes two ranks";
  for (const std::string& recipe : kRecipes) {
    SCOPED_TRACE(recipe);
    const Spread spread =
        make({.recipe = recipe,
              .layout = {.tp = 2, .plan = sequence_plan(), .transport = OverlapTransport::SendReceive},
              .fsdp = {.param_dtype = at::kBFloat16},
              .mixed = true});
    const int64_t elements = kRows * kLength / 2 * kDim;
    const auto step = [&] { loss_of(spread.model, global_batch().to(at::kBFloat16)).backward(); };
    const auto calls = calls_of("tp::gather parts", step);
    EXPECT_EQ(calls.size(), size_t{2 * 2 * kBlocks}) << "sent and received";
    int64_t narrow = 0;
    for (const auto& call : calls) {
      EXPECT_TRUE(call.bytes == elements || call.bytes == 2 * elements) << call.bytes;
      narrow += call.bytes == elements;
    }
    EXPECT_EQ(narrow, 2 * num_narrow_gathers(recipe));
  }
}

// A weight's scale is asked for once a step, an activation's once a product that it is cast for: the inputs
// of w1 and w3 and of w2, and three gradients.
TEST(Float8, ScalesOverTheAxisAreAskedForOnce) {
  if (world().size() != 2) GTEST_SKIP() << "takes two ranks";
  const Spread spread = make({.layout = {.tp = 2, .plan = sequence_plan()}, .mixed = true});
  for (int step = 0; step < 2; ++step) {
    const auto micro_batches = [&] {
      for (int i = 0; i < 2; ++i) loss_of(spread.model, global_batch()).backward();
    };
    EXPECT_EQ(calls_of("tp::float8_scales", micro_batches).size(), size_t{kBlocks} * (3 + 2 * 5)) << step;
    at::NoGradGuard no_grad;
    for (const Parameter& parameter : parameters(spread.model)) at::Tensor(parameter.data.local).mul_(0.9);
  }
}

TEST(Float8, APartThatIsKeptForTheBackwardIsOfBytesToo) {
  if (world().size() != 4) GTEST_SKIP() << "takes a shard axis of 4";
  for (const bool mixed : {false, true})
    expect_one_ranks({.layout = {.shard = 4},
                      .gather = {.in_float8 = true},
                      .fsdp = {.reshard_after_forward = ReshardAfterForward::to_size(2)},
                      .mixed = mixed});
}

// The weights that aren't cut have no ranks to share a scale with; those that are do.
TEST(Float8, WeightsOfAGroupMayBeCutOrNot) {
  if (world().size() != 4) GTEST_SKIP() << "takes 2 x 2 ranks";
  for (const bool at_once : {false, true})
    expect_one_ranks({.layout = {.shard = 2, .tp = 2, .plan = kFirstWeightAlone},
                      .gather = {.in_float8 = true, .scales_at_once = at_once}});
}

TEST(Float8, HalfOfBf16sBytesTravel) {
  if (world().size() == 1) GTEST_SKIP() << "nothing travels on one rank";
  const auto bytes = [](bool in_float8, bool mixed) {
    return gathered_bytes(make({.layout = {.shard = world().size()},
                                .gather = {.in_float8 = in_float8},
                                .fsdp = {.param_dtype = at::kBFloat16},
                                .mixed = mixed}));
  };
  const int64_t weights = kBlocks * (2 * padded(kHidden, kDim) + padded(kDim, kHidden));
  const int64_t others = kBlocks * (padded(kDim, kDim) + padded(kDim, 1));
  EXPECT_EQ(bytes(false, false), 2 * weights);
  EXPECT_EQ(bytes(true, false), weights);
  EXPECT_EQ(bytes(false, true), 2 * (weights + others));
  EXPECT_EQ(bytes(true, true), weights + 2 * others);
}

// A step is what writes the shards.
TEST(Float8, ScalesAreReducedOnceAStepOrOnceAGroup) {
  if (world().size() == 1) GTEST_SKIP() << "one rank has no one to ask";
  for (const bool at_once : {false, true}) {
    const Spread spread =
        make({.layout = {.shard = world().size()}, .gather = {.in_float8 = true, .scales_at_once = at_once}});
    for (int step = 0; step < 2; ++step) {
      const auto micro_batches = [&] {
        for (int i = 0; i < 2; ++i) loss_of(spread.model, global_batch()).backward();
      };
      EXPECT_EQ(calls_of("fsdp::float8_scales", micro_batches).size(), at_once ? 1u : size_t{kBlocks});
      at::NoGradGuard no_grad;
      for (const Parameter& parameter : parameters(spread.model)) at::Tensor(parameter.data.local).mul_(0.9);
    }
  }
}

// What a product reads is the cast of the whole fp32 weight; what doesn't travel in Float8 is in bf16. Also
// of rows that don't divide by the ranks, and from a part that was kept on a smaller mesh.
TEST(Float8, GatheredBytesAreTheCastOfTheWholeWeight) {
  if (world().size() == 1) GTEST_SKIP() << "nothing travels on one rank";
  const bool fours = world().size() == 4;
  const Spread spread = make({.layout = {.shard = world().size()},
                              .gather = {.in_float8 = true},
                              .fsdp = {.param_dtype = at::kBFloat16,
                                       .reshard_after_forward = fours ? ReshardAfterForward::to_size(2)
                                                                      : ReshardAfterForward::always()},
                              .mixed = true});
  {
    at::NoGradGuard no_grad;
    spread.model(global_batch());  // the first one makes groups know of each other
  }
  std::map<std::string, at::Tensor> whole;
  for (const Parameter& parameter : parameters(spread.model))
    whole[parameter.name] = full_tensor(parameter.data);
  int compared = 0;
  for (int block = 0; block < kBlocks; ++block) {
    const StackBlock& ref = spread.model->blocks[static_cast<size_t>(block)];
    const auto group = fsdp::states_below(*ref.ptr()).front()->group();
    for (int time = 0; time < 2; ++time) {
      group->start_unshard();
      group->finish_unshard();
      for (size_t slot = 0; slot < group->num_params(); ++slot) {
        const std::string name = str("blocks.", block, ".", group->param(slot).fqn);
        const at::Tensor& values = whole.at(name);
        if (name.find("feed_forward") == std::string::npos) {
          EXPECT_TRUE(at::equal(group->param(slot).compute.detach(), values.to(at::kBFloat16))) << name;
          continue;
        }
        const at::Tensor scale =
            float8::scale_of(float8::amax(values, float8::Over::Matrix), at::kFloat8_e4m3fn, false);
        const at::Tensor wanted = float8::cast(values, scale, at::kFloat8_e4m3fn, false);
        const ops::ScaledMatrix got = group->float8_weight(slot).along_rows;
        EXPECT_TRUE(at::equal(got.scale, scale)) << name;
        EXPECT_TRUE(at::equal(got.data.view(at::kByte), wanted.view(at::kByte))) << name;
        ++compared;
      }
      group->after_forward();
    }
  }
  EXPECT_EQ(compared, 2 * 3 * kBlocks);
}

TEST(Float8, ARecipeThatCastsAWeightInTwoWaysIsntGathered) {
  EXPECT_THROW(
      make({.recipe = "rowwise", .layout = {.shard = world().size()}, .gather = {.in_float8 = true}}), Error);
}

// A step writes the shards: what is gathered then has new scales.
TEST(Float8, ScalesFollowTheWeights) {
  const Layout layout{.shard = world().size()};
  for (const bool at_once : {false, true}) {
    const Spread gathered =
                     make({.layout = layout, .gather = {.in_float8 = true, .scales_at_once = at_once}}),
                 plain = make({.layout = layout});
    for (const float factor : {1.0f, 3.0f, 0.01f}) {
      for (const Spread* each : {&gathered, &plain})
        for (const Parameter& parameter : parameters(each->model)) {
          at::NoGradGuard no_grad;
          at::Tensor(parameter.data.local).mul_(factor);
        }
      at::NoGradGuard no_grad;
      const at::Tensor got = gathered.model(global_batch()), wanted = plain.model(global_batch());
      EXPECT_LT(((got - wanted).norm() / wanted.norm()).item<double>(), 1e-6) << factor;
    }
  }
}

TEST(Float8, ANanInOneShardSpoilsTheWholeWeight) {
  const Spread spread = make({.layout = {.shard = world().size()}, .gather = {.in_float8 = true}});
  at::NoGradGuard no_grad;
  if (world().rank() == world().size() - 1)
    at::Tensor(parameters(spread.model)[0].data.local).view(-1)[0] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(at::isnan(spread.model(global_batch())).all().item<bool>());
}

}  // namespace
}  // namespace titan
