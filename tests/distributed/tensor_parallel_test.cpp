// Compares users' and LibTorch's modules, split by plans, with the same modules on one rank: every
// parameter's gradient, with and without fully_shard, over backwards that accumulate.

#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include "distributed/llama_case.h"
#include "titan/core/error.h"
#include "titan/nn/layers.h"
#include "titan/nn/loss.h"
#include "titan/parallel/fsdp.h"
#include "titan/parallel/parameters.h"
#include "titan/parallel/tensor_parallel.h"

namespace titan {
namespace {

using namespace titan::testing;  // NOLINT: the test's own names
using Layout = ActivationLayout;

Construct deferred_here() { return deferred(device(), at::kDouble); }

/// y = x K + b with K: [in, out], the transpose of Linear's weight, so it must define how it is split.
class OwnProductImpl : public nn::Module, public nn::Splittable {
 public:
  OwnProductImpl(int64_t in, int64_t out) {
    kernel = register_init_parameter("kernel", {in, out}, nn::Init::normal(0, 0.5), deferred_here());
    shift = register_init_parameter("shift", {out}, nn::Init::normal(0, 0.5), deferred_here());
  }
  at::Tensor forward(const at::Tensor& x) {
    check_entered_through_ref();
    return at::matmul(x, kernel) + (adds_shift_ ? shift : shift * 0);
  }
  std::vector<nn::ParamSplit> param_splits(nn::Split split) const override {
    if (split == nn::Split::Columns) return {{"kernel", 1}, {"shift", 0}};
    return {{"kernel", 0}, {"shift", -1, /*gradient_is_summand=*/true}};
  }
  void set_split(nn::Split split, std::shared_ptr<const ops::RankParts> parts) override {
    adds_shift_ = split == nn::Split::Columns || parts->index() == 0;
  }
  at::Tensor kernel, shift;

 private:
  bool adds_shift_ = true;
};
TITAN_MODULE(OwnProduct);

using TorchLinear = nn::Ref<nn::Hooked<torch::nn::LinearImpl>>;

// Sizes that aren't multiples of 2, 3 or 4.
constexpr int64_t kVocab = 11, kDim = 7, kHidden = 13;
constexpr int64_t kRows = 4, kSequence = 12;

class MlpImpl : public nn::Module {
 public:
  MlpImpl()
      : up(kDim, kHidden),
        gate(kDim, kHidden),
        down(kHidden, kDim, nn::LinearOptions{.bias = true, .construct = deferred_here()}) {
    gate->to(device(), at::kDouble);
    register_module("up", up);
    register_module("gate", gate);
    register_module("down", down);
  }
  at::Tensor forward(const at::Tensor& x) {
    check_entered_through_ref();
    return down(at::tanh(up(x)) * gate(x));
  }
  OwnProduct up;
  TorchLinear gate;
  nn::Linear down;
};
TITAN_MODULE(Mlp);

class NetImpl : public nn::Module {
 public:
  NetImpl()
      : embedding(kVocab, kDim, deferred_here()),
        mix(kDim, kDim),
        norm(kDim, 1e-5, deferred_here()),
        head(kDim, kVocab, nn::LinearOptions{.bias = true, .construct = deferred_here()}) {
    register_module("embedding", embedding);
    register_module("mix", mix);
    register_module("norm", norm);
    register_module("mlp", mlp);
    register_module("head", head);
  }
  at::Tensor forward(const at::Tensor& tokens_BS) {
    check_entered_through_ref();
    const at::Tensor h = norm(mix(embedding(tokens_BS)));
    return head(h + mlp(h));
  }
  nn::Embedding embedding;
  OwnProduct mix;
  nn::RMSNorm norm;
  Mlp mlp;
  nn::Linear head;
};
TITAN_MODULE(Net);

// Between norm and head each rank has a part of the sequence.
TensorPlan by_sequence() {
  return {
      {"embedding", Colwise{.output = Layout::invariant()}},
      {"mix", Rowwise{.input = Layout::invariant()}},
      {"norm", PrepareInput{Layout::invariant(), Layout::shard(1)}},
      {"norm", SequenceParallel{}},
      {"mlp", PrepareInput{Layout::shard(1), Layout::replicate()}},
      {"mlp.up", Colwise{.input = Layout::replicate()}},
      {"mlp.gate", Colwise{.input = Layout::replicate()}},
      {"mlp.down", Rowwise{.output = Layout::shard(1)}},
      {"head", Colwise{.input = Layout::shard(1), .output = Layout::invariant()}},
  };
}
// Activations are whole between the products, and each product converts its own input and output.
TensorPlan by_product() {
  return {
      {"embedding", Rowwise{}},
      {"mlp.up", Colwise{}},
      {"mlp.*ate", Colwise{}},
      {"mlp.down", Rowwise{}},
      {"head", Colwise{.output = Layout::invariant()}},
  };
}
// Whole modules that receive summands of their outputs' gradients, or a part of the tokens.
TensorPlan whole_modules() {
  return {
      {"mix", SequenceParallel{}},
      {"mix", PrepareInput{Layout::invariant(), Layout::replicate()}},
      {"norm", PrepareInput{Layout::replicate(), Layout::shard(1)}},
      {"norm", SequenceParallel{}},
      {"mlp", SequenceParallel{}},
      {"head", Colwise{.input = Layout::shard(1), .output = Layout::invariant()}},
  };
}

struct Case {
  const char* name;
  TensorPlan (*plan)();
  bool sharded;    // also by fully_shard
  int backwards;   // number of backwards that accumulate
  bool last_only;  // mark only the last backward as the last micro-batch
};

void PrintTo(const Case& test, std::ostream* out) { *out << test.name; }

class TensorParallel : public ::testing::TestWithParam<Case> {};

// The same weights in every layout: deferred weights depend on their names, LibTorch's on the generator.
Net build() {
  at::manual_seed(7);
  return Net();
}

struct Tokens {
  at::Tensor tokens;   // [backwards, rows, sequence]
  at::Tensor weights;  // [vocabulary]
};
Tokens tokens_for(int backwards) {
  at::manual_seed(9);
  return {at::randint(kVocab, {backwards, kRows, kSequence}, at::kLong).to(device()),
          at::randn({kVocab}, at::kDouble).to(device())};
}
at::Tensor loss_of(const at::Tensor& logits, const at::Tensor& weights) {
  return (logits * weights).tanh().sum();
}

double relative_error(const at::Tensor& got, const at::Tensor& expected) {
  const double norm = expected.norm().item<double>();
  return (got - expected).norm().item<double>() / (norm == 0 ? 1 : norm);
}

void expect_equal_gradients(const nn::AnyRef& model, const nn::AnyRef& reference, const std::string& what) {
  const auto expected = parameters(reference);
  const auto got = parameters(model);
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].name, expected[i].name);
    ASSERT_TRUE(got[i].data.local.grad().defined()) << what << " " << got[i].name;
    DTensor gradient = got[i].data;
    gradient.local = gradient.local.grad();
    const at::Tensor wanted = expected[i].data.local.grad();
    EXPECT_GT(wanted.norm().item<double>(), 0) << got[i].name << " is all zeros, so nothing is compared";
    EXPECT_LE(relative_error(full_tensor(gradient), wanted), 1e-10) << what << " " << got[i].name;
  }
}

// Tensor-parallel degrees; without fully_shard only all ranks, because nothing sums over data-parallel ranks.
std::vector<int> tp_degrees(bool sharded) {
  if (sharded && world().size() == 4) return {2, 4};
  return {world().size()};
}

TEST_P(TensorParallel, EqualsOneRank) {
  const Case& test = GetParam();
  const auto [tokens, weights] = tokens_for(test.backwards);
  const Net reference = build();
  materialize(reference, 3);
  for (int i = 0; i < test.backwards; ++i) loss_of(reference(tokens[i]), weights).backward();

  for (const int tp : tp_degrees(test.sharded)) {
    const auto mesh = DeviceMesh::create(world(), {{"dp", world().size() / tp}, {"tp", tp}});
    const Net net = build();
    parallelize(net, mesh["tp"], test.plan());
    const FsdpOptions fsdp{.mesh = mesh["dp"]};
    if (test.sharded) {
      fully_shard(net->mlp->gate, fsdp);  // alone: its values exist already
      fully_shard(net->mlp, fsdp);
      fully_shard(net, fsdp);
    }
    materialize(net, 3);
    double loss = 0;
    for (int i = 0; i < test.backwards; ++i) {
      if (test.sharded) set_last_micro_batch(net, !test.last_only || i + 1 == test.backwards);
      const at::Tensor mine = tokens[i].slice(0, mesh["dp"].rank(), {}, mesh["dp"].size());
      const at::Tensor part = loss_of(net(mine), weights);
      part.backward();
      loss += part.item<double>();
    }
    expect_equal_gradients(net, reference, str("tp ", tp));
  }
}

INSTANTIATE_TEST_SUITE_P(Plans, TensorParallel,
                         ::testing::Values(Case{"BySequence", by_sequence, false, 1, false},
                                           Case{"BySequenceTwice", by_sequence, false, 2, false},
                                           Case{"BySequenceSharded", by_sequence, true, 1, false},
                                           Case{"BySequenceShardedTwice", by_sequence, true, 2, false},
                                           Case{"BySequenceShardedMicroBatches", by_sequence, true, 2, true},
                                           Case{"ByProduct", by_product, false, 1, false},
                                           Case{"ByProductTwice", by_product, false, 2, false},
                                           Case{"ByProductSharded", by_product, true, 2, false},
                                           Case{"WholeModules", whole_modules, false, 2, false},
                                           Case{"WholeModulesSharded", whole_modules, true, 2, true}),
                         [](const auto& info) { return std::string(info.param.name); });

// ---- tied weights

nn::LossHeadOptions loss_head(const at::Tensor& tied_weight = {}, const nn::Loss& loss = nullptr) {
  return {.init = nn::Init::normal(0, 0.5),
          .tied_weight = tied_weight,
          .construct = deferred_here(),
          .loss = loss};
}

class TiedImpl : public nn::Module {
 public:
  explicit TiedImpl(const nn::Loss& loss)
      : embedding(kVocab, kDim, deferred_here()), norm(kDim, 1e-5, deferred_here()) {
    head = nn::LinearCrossEntropy(kDim, kVocab, loss_head(embedding->weight, loss));
    register_module("embedding", embedding);
    register_module("norm", norm);
    register_module("head", head);
  }
  at::Tensor forward(const at::Tensor& tokens_BS) {
    check_entered_through_ref();
    return head(norm(embedding(tokens_BS)), tokens_BS.roll(1, 1), kRows * kSequence);
  }
  nn::Embedding embedding;
  nn::RMSNorm norm;
  nn::LinearCrossEntropy head{nullptr};
};
TITAN_MODULE(Tied);

TensorPlan tied_plan(const Layout& stream) {
  TensorPlan plan = {{"embedding", Rowwise{.output = stream}}, {"head", Colwise{.input = stream}}};
  if (stream.kind == Layout::Kind::Shard) plan.push_back({"norm", SequenceParallel{}});
  return plan;
}

// By sequence or by product, with or without fully_shard, for every loss. The vocabulary is split over all
// ranks.
class TiedTensorParallel : public ::testing::TestWithParam<std::tuple<bool, bool, const char*>> {};

TEST_P(TiedTensorParallel, EqualsOneRank) {
  const auto [by_sequence, sharded, loss_name] = GetParam();
  const at::Tensor tokens = tokens_for(2).tokens;
  const Tied reference(loss_named(loss_name));
  materialize(reference, 3);
  const at::Tensor expected = reference(tokens[0]);
  expected.backward();
  reference(tokens[1]).backward();

  const auto mesh = DeviceMesh::create(world(), {{"dp", 1}, {"tp", world().size()}});
  const Tied net(loss_named(loss_name));
  parallelize(net, mesh["tp"], tied_plan(by_sequence ? Layout::shard(1) : Layout::invariant()));
  if (sharded) fully_shard(net, {.mesh = mesh["dp"]});
  materialize(net, 3);
  const at::Tensor loss = net(tokens[0]);
  EXPECT_NEAR(loss.item<double>(), expected.item<double>(), 1e-12);
  loss.backward();
  net(tokens[1]).backward();
  EXPECT_EQ(parameters(net).size(), 2u) << "the tied weight counts once";
  expect_equal_gradients(net, reference, "tied");
}

INSTANTIATE_TEST_SUITE_P(Tied, TiedTensorParallel,
                         ::testing::Combine(::testing::Bool(), ::testing::Bool(),
                                            ::testing::Values("cross_entropy", "z_loss", "label_smoothing")),
                         [](const auto& info) {
                           return str(std::get<0>(info.param) ? "BySequence" : "ByProduct",
                                      std::get<1>(info.param) ? "Sharded" : "", "_", std::get<2>(info.param));
                         });

// ---- values

TEST(TensorParallelValues, AreSplitFromExistingValues) {
  const auto axis = DeviceMesh::create(world(), {{"tp", world().size()}});
  const Net whole = build(), net = build();
  parallelize(net, axis, by_product());
  const at::Tensor weight = whole->mlp->gate->weight;
  const auto mine = weight.chunk(world().size(), 0)[static_cast<size_t>(world().rank())];
  EXPECT_TRUE(net->mlp->gate->weight.equal(mine));
  EXPECT_NE(net->mlp->gate->weight.storage().data(), weight.storage().data());
}

// With one row over several ranks, all ranks but one have no row, and so nothing to shard.
TEST(TensorParallelValues, EmptyPartsHaveEmptyGradients) {
  const int tp = world().size() == 4 ? 2 : world().size();
  const auto mesh = DeviceMesh::create(world(), {{"dp", world().size() / tp}, {"tp", tp}});
  const nn::Linear linear(kDim, 1, nn::LinearOptions{.bias = true, .construct = deferred_here()});
  parallelize(linear, mesh["tp"], {{"", Colwise{.output = Layout::invariant()}}});
  fully_shard(linear, {.mesh = mesh["dp"]});
  materialize(linear, 1);
  const at::Tensor x = at::randn({3, kDim}, at::kDouble).to(device());
  linear(x).sum().backward();
  const double dp = mesh["dp"].size();  // all dp ranks compute the same rows
  for (const Parameter& parameter : parameters(linear)) {
    const at::Tensor& gradient = parameter.data.local.grad();
    ASSERT_TRUE(gradient.defined()) << parameter.name;
    EXPECT_EQ(gradient.sizes(), parameter.data.local.sizes()) << parameter.name;
    const at::Tensor wanted = parameter.name == "bias" ? at::full({1}, 3 * dp, x.options()) : x.sum(0) * dp;
    if (gradient.numel() > 0)
      EXPECT_TRUE(at::allclose(gradient.view(-1), wanted, 0, 1e-12)) << parameter.name;
  }
}

// Without gathering, each rank has the logits of its part of the vocabulary.
TEST(TensorParallelValues, LossHeadKeepsLogitsSplit) {
  const auto axis = DeviceMesh::create(world(), {{"tp", world().size()}});
  const nn::LinearCrossEntropy whole(kDim, kVocab, loss_head()), head(kDim, kVocab, loss_head());
  parallelize(head, axis, {{"", Colwise{}}});
  materialize(whole, 1);
  materialize(head, 1);
  const at::Tensor x = at::randn({3, kDim}, at::kDouble).to(device());
  const auto parts = whole(x).chunk(world().size(), -1);
  EXPECT_TRUE(at::allclose(head(x), parts[static_cast<size_t>(world().rank())], 0, 1e-12));
}

}  // namespace
}  // namespace titan
