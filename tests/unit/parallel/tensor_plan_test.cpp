// Plans that parallelize() refuses, its effect on a model, and the rows that describe it, on one rank of the
// `fake` backend.

#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include "tensor/memory.h"
#include "titan/core/error.h"
#include "titan/dist/world.h"
#include "titan/nn/containers.h"
#include "titan/nn/layers.h"
#include "titan/parallel/fsdp.h"
#include "titan/parallel/parameters.h"
#include "titan/parallel/tensor_parallel.h"

namespace titan {
namespace {

using Layout = ActivationLayout;

DeviceMesh axis(int size = 2, int rank = 1) {
  const auto world = dist::init({.backend = "fake", .fake_rank = rank, .fake_world_size = size});
  return DeviceMesh::create(world, {{"tp", size}});
}

class LayerImpl : public nn::Module {
 public:
  LayerImpl() : norm(6), up(6, 8), down(8, 6, nn::LinearOptions{.bias = true}), plain(6, 6) {
    register_module("norm", norm);
    register_module("up", up);
    register_module("down", down);
    register_module("plain", plain);
  }
  at::Tensor forward(const at::Tensor& x) { return down(up(norm(x))); }
  nn::RMSNorm norm;
  nn::Linear up, down;
  torch::nn::Linear plain;  // LibTorch's own, without slots for hooks
};
TITAN_MODULE(Layer);

class TokenNetImpl : public nn::Module {
 public:
  TokenNetImpl()
      : tokens(10, 6), head(6, 10, nn::LossHeadOptions{.init = {}, .tied_weight = tokens->weight}) {
    register_module("tokens", tokens);
    register_module("layers", layers.ptr());
    for (int i = 0; i < 2; ++i) layers.push_back(Layer());
    register_module("head", head);
  }
  at::Tensor forward(const at::Tensor& ids, const at::Tensor& labels) {
    at::Tensor x = tokens(ids);
    for (const Layer& layer : layers) x = layer(x);
    return head(x, labels, ids.numel());
  }
  nn::Embedding tokens;
  nn::ModuleList<Layer> layers;
  nn::LinearCrossEntropy head;
};
TITAN_MODULE(TokenNet);

std::vector<std::string> problems_of(const TensorPlan& plan) {
  try {
    parallelize(TokenNet(), axis(), plan);
  } catch (const ConfigError& error) {
    return error.problems();
  }
  ADD_FAILURE() << "the plan was accepted";
  return {};
}

void expect_problem(const TensorPlan& plan, const std::string& expected) {
  for (const std::string& problem : problems_of(plan))
    if (problem.find(expected) != std::string::npos) return;
  ADD_FAILURE() << "no problem says \"" << expected << "\", but\n  "
                << ::testing::PrintToString(problems_of(plan));
}

TEST(TensorPlan, RefusesEntriesThatMatchNothing) {
  expect_problem({{"layers.*.mid", Colwise{}}},
                 "plan entry 'layers.*.mid' matches no module; the modules are tokens");
  expect_problem({{"layers.*", Colwise{}}, {"*.up", Colwise{}}}, "'*.up' matches no module");
}

TEST(TensorPlan, ReportsAllProblemsAtOnce) {
  EXPECT_EQ(problems_of({{"a", Colwise{}}, {"layers.0.up", Colwise{}}, {"b", Rowwise{}}}).size(), 2u);
}

TEST(TensorPlan, RefusesModulesWithoutSlots) {
  expect_problem({{"layers.0.plain", Colwise{}}},
                 "module 'layers.0.plain' of plan entry 'layers.0.plain' isn't called through nn::Ref");
  expect_problem({{"layers.1", SequenceParallel{}}},
                 "module 'layers.1.plain' has parameters but doesn't inherit nn::HookHost");
}

TEST(TensorPlan, RefusesToCutTwice) {
  expect_problem({{"layers.*.up", Colwise{}}, {"layers.1.up", Rowwise{}}},
                 "module 'layers.1.up' is cut by two entries");
  expect_problem({{"layers.0.norm", SequenceParallel{}}, {"layers.0.norm", SequenceParallel{}}},
                 "module 'layers.0.norm' is cut by two entries");
}

TEST(TensorPlan, RefusesATakenSlot) {
  const PrepareInput input{Layout::invariant(), Layout::replicate()};
  expect_problem({{"layers.0", input}, {"layers.0", input}},
                 "another hook prepares the inputs of module 'layers.0' already");
  expect_problem(
      {{"layers.0.down", Rowwise{}}, {"layers.0.down", PrepareOutput{Layout::partial(), Layout::shard(1)}}},
      "another hook prepares the outputs of module 'layers.0.down' already");
}

TEST(TensorPlan, RefusesUnknownConversions) {
  const std::vector<std::pair<Layout, Layout>> impossible = {{Layout::replicate(), Layout::invariant()},
                                                             {Layout::replicate(), Layout::partial()},
                                                             {Layout::invariant(), Layout::partial()},
                                                             {Layout::shard(0), Layout::shard(1)},
                                                             {Layout::shard(0), Layout::partial()}};
  for (const auto& [from, to] : impossible)
    expect_problem({{"layers.0", PrepareInput{from, to}}},
                   str("module 'layers.0': an activation can't go from ", from, " to ", to));
}

TEST(TensorPlan, RefusesShardedModules) {
  const TokenNet net;
  const DeviceMesh mesh = axis();
  fully_shard(net, {.mesh = mesh});
  try {
    parallelize(net, mesh, {{"layers.0.up", Colwise{}}});
    ADD_FAILURE() << "a sharded module was cut";
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("'layers.0.up' is sharded already; call parallelize before"),
              std::string::npos)
        << error.what();
  }
}

void expect_error(const TensorPlan& plan, const std::string& expected) {
  try {
    parallelize(TokenNet(), axis(), plan);
    ADD_FAILURE() << "the plan was accepted";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(expected), std::string::npos) << error.what();
  }
}

TEST(TensorPlan, RefusesTiedWeightsThatAreCutDifferently) {
  expect_problem({{"tokens", Colwise{}}, {"head", Colwise{}}},
                 "modules 'tokens' and 'head' share parameter 'weight' but are cut differently");
}

// Otherwise the other module would look up rows that are on other ranks.
TEST(TensorPlan, RefusesTiedWeightsThatOnlyOneEntryCuts) {
  expect_problem({{"head", Colwise{}}}, "module 'tokens' shares its parameter 'weight' with 'head'");
  expect_problem({{"tokens", Rowwise{}}}, "module 'head' shares its parameter 'weight' with 'tokens'");
}

TEST(TensorPlan, RefusesToCutParametersOfAnEarlierPlan) {
  const TokenNet net;
  const DeviceMesh mesh = axis();
  const TensorPlan both = {{"tokens", Rowwise{}}, {"head", Colwise{}}};
  parallelize(net, mesh, both);
  const auto sizes = net->tokens->weight.sizes().vec();
  EXPECT_THROW(parallelize(net, mesh, both), ConfigError);
  EXPECT_EQ(net->tokens->weight.sizes().vec(), sizes);
}

TEST(TensorPlan, AppliesOnceToAModuleWithTwoNames) {
  nn::Sequential twice;
  const nn::RMSNorm norm(6);
  twice->push_back(norm);
  twice->push_back(norm);
  EXPECT_NO_THROW(parallelize(twice, axis(), {{"*", SequenceParallel{}}}));
  for (const PlanRow& row : plan_rows(twice)) EXPECT_EQ(row.weight, "weight Replicate");
}

TEST(TensorPlan, RefusesDuplicateTensorNumbers) {
  const PrepareInput twice{Layout::invariant(), Layout::replicate(), {0, 0}};
  expect_problem({{"layers.0", twice}}, "`tensors` for module 'layers.0' has duplicate numbers");
}

TEST(TensorPlan, RefusesSplitsThatAModuleDoesNotSupport) {
  expect_error({{"head", Rowwise{}}}, "the loss head 'head' can be split by columns (its vocabulary) only");
  expect_error({{"layers.0.norm", Rowwise{}}}, "don't know how to cut parameter 'weight' [6] of module");
}

// Its weight has two dimensions, too, but a lookup in a part of it would return another token's row.
TEST(TensorPlan, RefusesLibTorchsEmbedding) {
  const nn::Ref<nn::Hooked<torch::nn::EmbeddingImpl>> embedding(torch::nn::EmbeddingOptions(10, 6));
  for (const ParallelStyle& style : {ParallelStyle(Colwise{}), ParallelStyle(Rowwise{})})
    EXPECT_THROW(parallelize(embedding, axis(), {{"", style}}), Error);
}

TEST(TensorPlan, NeedsAMeshOfOneAxis) {
  const auto world = dist::init({.backend = "fake", .fake_rank = 0, .fake_world_size = 4});
  EXPECT_THROW(parallelize(TokenNet(), DeviceMesh::create(world, {{"a", 2}, {"b", 2}}), {}), Error);
}

TEST(TensorPlan, OnOneRankChangesNothing) {
  const TokenNet net;
  parallelize(net, DeviceMesh(), {{"layers.*.up", Colwise{}}, {"no such module", Rowwise{}}});
  EXPECT_EQ(net->layers[0]->up->weight.size(0), 8);
  EXPECT_TRUE(plan_rows(net).empty());
}

// The last rank has fewer rows, or none.
TEST(TensorPlan, CutsLikeTorchChunk) {
  const std::vector<int64_t> expected = {3, 3, 3, 1};
  for (int rank = 0; rank < 4; ++rank) {
    const nn::Linear linear(6, 10, nn::LinearOptions{.construct = deferred(at::kCPU)});
    parallelize(linear, axis(4, rank), {{"", Colwise{}}});
    EXPECT_EQ(linear->weight.size(0), expected[static_cast<size_t>(rank)]);
    EXPECT_TRUE(is_deferred(linear->weight));
  }
  const nn::Linear five(6, 5);
  parallelize(five, axis(4, 3), {{"", Colwise{}}});
  EXPECT_EQ(five->weight.size(0), 0);
}

TEST(TensorPlan, ParametersDescribeTheirWholeTensor) {
  const nn::Linear linear(6, 10, nn::LinearOptions{.bias = true});
  parallelize(linear, axis(4, 2), {{"", Rowwise{}}});
  const auto list = parameters(linear);
  ASSERT_EQ(list.size(), 2u);
  EXPECT_EQ(list[0].data.global_shape, (std::vector<int64_t>{10, 6}));
  EXPECT_EQ(list[0].data.placements, std::vector<Placement>{Placement::shard(1)});
  EXPECT_EQ(list[0].data.box.offset, (std::vector<int64_t>{0, 4}));
  EXPECT_EQ(list[0].data.local.sizes(), (at::IntArrayRef{10, 2}));
  EXPECT_EQ(list[1].data.placements, std::vector<Placement>{Placement::replicate()});
  EXPECT_EQ(list[1].data.local.sizes(), at::IntArrayRef{10});
}

// ---- rows

PlanRow row_of(const std::vector<PlanRow>& rows, const std::string& module) {
  for (const PlanRow& row : rows)
    if (row.module == module) return row;
  ADD_FAILURE() << "no row for '" << module << "'";
  return {};
}

TEST(PlanRows, ShowStylesPlacementsAndCollectives) {
  const TokenNet net;
  const Layout stream = Layout::shard(1);
  parallelize(net, axis(),
              {{"tokens", Rowwise{.output = stream}},
               {"layers.*.norm", SequenceParallel{}},
               {"layers.*.norm", PrepareOutput{stream, Layout::replicate()}},
               {"layers.*.up", Colwise{.input = Layout::replicate()}},
               {"layers.*.down", Rowwise{.output = stream}},
               {"head", Colwise{.input = stream}}});
  const int64_t rows = 3, sequence = 4;
  const at::Tensor ids = at::zeros({rows, sequence}, at::kLong);
  net(ids, ids).backward();
  const auto table = plan_rows(net);
  std::vector<std::string> modules;
  for (const PlanRow& row : table) modules.push_back(row.module);
  EXPECT_EQ(modules, (std::vector<std::string>{"tokens", "layers.0.norm", "layers.0.up", "layers.0.down",
                                               "layers.1.norm", "layers.1.up", "layers.1.down", "head"}));

  // This rank receives half of a whole activation from the other rank, in both directions.
  const int64_t half = rows * sequence * 6 * 4 / 2;
  const PlanRow norm = row_of(table, "layers.1.norm");
  EXPECT_EQ(norm.style, "SequenceParallel, PrepareOutput");
  EXPECT_EQ(norm.weight, "weight Replicate");
  EXPECT_EQ(norm.activation, "out Shard(1) -> Replicate");
  EXPECT_EQ(norm.collectives, "- / all-reduce of gradients; all-gather / reduce-scatter");
  EXPECT_EQ(norm.bytes, 2 * half);
  const PlanRow up = row_of(table, "layers.0.up");
  EXPECT_EQ(up.style, "Colwise");
  EXPECT_EQ(up.weight, "weight Shard(0)");
  EXPECT_EQ(up.activation, "in Replicate; out Shard(-1)");
  EXPECT_EQ(up.collectives, "");
  EXPECT_EQ(up.bytes, 0);
  const PlanRow down = row_of(table, "layers.0.down");
  EXPECT_EQ(down.style, "Rowwise");
  EXPECT_EQ(down.weight, "weight Shard(1), bias Replicate");
  EXPECT_EQ(down.activation, "in Shard(-1); out Partial -> Shard(1)");
  EXPECT_EQ(down.bytes, 2 * half);
  const PlanRow head = row_of(table, "head");
  EXPECT_EQ(head.collectives, "all-gather per chunk / -; all-gather / reduce-scatter");
  // The head also receives two statistics per token, in double.
  EXPECT_EQ(head.bytes, 2 * half + 2 * rows * sequence * 8);
}

TEST(PlanRows, ShowOverlapBeforeAnyForward) {
  const nn::Linear linear(6, 10);
  parallelize(linear, axis(), {{"", Colwise{.input = Layout::shard(1), .overlap = true}}});
  const PlanRow row = row_of(plan_rows(linear), "");
  EXPECT_EQ(row.collectives, "all-gather / reduce-scatter in products");
  EXPECT_NE(row.transport, "");
  EXPECT_EQ(row.calls, 0);
}

}  // namespace
}  // namespace titan
