// Compares fully_shard with the same network unsharded: values, every gradient, and which groups are gathered
// when.

#include <algorithm>
#include <functional>
#include <optional>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/optim/adamw.h>

#include "distributed/toy_case.h"
#include "titan/parallel/fsdp.h"
#include "titan/parallel/parameters.h"

namespace titan {
namespace {

using namespace testing;  // NOLINT: the test's own names

class FsdpEngine : public ::testing::TestWithParam<at::ScalarType> {};

TEST_P(FsdpEngine, EqualsOneRankOverLayoutsPoliciesAndMicroBatches) {
  expect_one_ranks_gradients(sharded_toy, GetParam(), GetParam() == at::kDouble ? 1e-12 : 1e-5);
}
INSTANTIATE_TEST_SUITE_P(Dtypes, FsdpEngine, ::testing::Values(at::kFloat, at::kDouble));

TEST(FsdpEngineMemory, GathersAtMostTwoGroupsAndAllocatesBuffersOnce) {
  const int size = testing::world().size(), rank = testing::world().rank();
  if (size == 1) GTEST_SKIP() << "one rank gathers nothing";
  const ToyOptions options{.num_blocks = 6};
  const at::Tensor rows = my_rows(input_rows(12, options.dim, at::kFloat), rank, size);
  for (const DataLayout& layout : layouts(size)) {
    for (const bool mixed : {false, true}) {
      FsdpOptions fsdp{.mesh = mesh_of(layout)};
      if (mixed) fsdp.param_dtype = at::kBFloat16, fsdp.reduce_dtype = at::kFloat;
      Toy model = sharded_toy(options, at::kFloat, fsdp);
      int64_t allocations = 0;
      for (int step = 0; step < 6; ++step) {
        run_micro_batches(model, rows, 2);
        const FsdpStats stats = fsdp_stats(model);
        EXPECT_EQ(stats.gathered_groups, 0);
        EXPECT_LE(stats.max_gathered_groups, 3) << "two blocks and the root";
        if (step >= 2 && device().is_cpu())
          EXPECT_EQ(stats.communication_buffer_allocations, allocations)
              << "replicate " << layout.replicate << " shard " << layout.shard << " mixed " << mixed
              << " step " << step;
        allocations = stats.communication_buffer_allocations;
      }
    }
  }
}

/// The layouts in which something is gathered.
std::vector<DataLayout> gathering_layouts() {
  std::vector<DataLayout> found;
  for (const DataLayout& layout : layouts(testing::world().size()))
    if (layout.shard > 1) found.push_back(layout);
  return found;
}

TEST(FsdpEnginePrefetch, GathersAsFarAheadAsAsked) {
  const int size = testing::world().size(), rank = testing::world().rank();
  const ToyOptions options{.num_blocks = 6};
  const at::Tensor batch = input_rows(12, options.dim, at::kDouble);
  Toy reference(options, at::kDouble);
  loss_of(reference(batch)).backward();
  for (const DataLayout& layout : gathering_layouts())
    for (const int prefetch : {0, 1, 2, 9}) {
      Toy model = sharded_toy(options, at::kDouble, {.mesh = mesh_of(layout), .prefetch = prefetch});
      for (int step = 0; step < 3; ++step) {
        forget_gradients(model);
        const at::Tensor loss = loss_of(model(my_rows(batch, rank, size)));
        const int forward = std::min(prefetch, step > 0 ? 5 : 0);
        EXPECT_EQ(fsdp_stats(model).max_gathered_groups, 2 + forward)
            << "the root, a block and the next ones";
        loss.backward();
        const FsdpStats stats = fsdp_stats(model);
        EXPECT_EQ(stats.max_gathered_groups, 2 + std::min(prefetch, 5)) << prefetch << " in step " << step;
        EXPECT_EQ(stats.gathered_groups, 0);
        expect_equal_gradients(model, reference, 1e-12, str("prefetch ", prefetch));
      }
    }
}

TEST(FsdpEnginePrefetch, FollowsTheListsOfModules) {
  const int size = testing::world().size(), rank = testing::world().rank();
  const ToyOptions options{.num_blocks = 6};
  const at::Tensor batch = input_rows(12, options.dim, at::kDouble);
  Toy reference(options, at::kDouble);
  loss_of(reference(batch)).backward();
  for (const DataLayout& layout : gathering_layouts()) {
    Toy model = sharded_toy(options, at::kDouble, {.mesh = mesh_of(layout), .prefetch = 0});
    auto& blocks = model->blocks;
    set_forward_prefetch(blocks[0], {blocks[1], blocks[2], blocks[3]});
    set_backward_prefetch(blocks[5], {blocks[3]});
    for (int step = 0; step < 2; ++step) {
      forget_gradients(model);
      const at::Tensor loss = loss_of(model(my_rows(batch, rank, size)));
      EXPECT_EQ(fsdp_stats(model).max_gathered_groups, 5)
          << "the root and blocks 0 to 3, in the first step, too";
      loss.backward();
      EXPECT_EQ(fsdp_stats(model).max_gathered_groups, 4) << "the root and blocks 5 to 3";
      expect_equal_gradients(model, reference, 1e-12, "lists");
    }
    set_forward_prefetch(blocks[0], {});
    EXPECT_GT(loss_of(model(my_rows(batch, rank, size))).item<double>(), 0);
    EXPECT_EQ(fsdp_stats(model).max_gathered_groups, 2) << "an empty list gathers nothing ahead";
  }
}

/// One block runs twice, around another whose gradient isn't needed on every rank.
class RunsTwiceImpl : public nn::Module {
 public:
  explicit RunsTwiceImpl(at::ScalarType dtype)
      : first(6, 7, dtype), twice(6, 7, dtype), between(6, 7, dtype) {
    register_module("first", first);
    register_module("twice", twice);
    register_module("between", between);
  }
  at::Tensor forward(const at::Tensor& x, bool detaches) {
    const at::Tensor h = twice(first(x)), y = between(h);
    return twice(detaches ? h + y.detach() - h.detach() : y);
  }
  testing::Block first, twice, between;
};
TITAN_MODULE(RunsTwice);

// All ranks gather in the same order, whichever backwards they reach.
TEST(FsdpEnginePrefetch, KeepsTheOrderIfAGroupRunsTwice) {
  const int size = testing::world().size(), rank = testing::world().rank();
  const at::Tensor batch = input_rows(12, 6, at::kDouble);
  RunsTwice reference(at::kDouble);
  for (int r = 0; r < size; ++r) loss_of(reference(my_rows(batch, r, size), r == 1)).backward();
  for (const DataLayout& layout : gathering_layouts())
    for (const int prefetch : {1, 2, 9, -1}) {
      const bool by_lists = prefetch < 0;
      const FsdpOptions options{.mesh = mesh_of(layout), .prefetch = by_lists ? 1 : prefetch};
      RunsTwice model(at::kDouble);
      fully_shard(model->first, options);
      fully_shard(model->twice, options);
      fully_shard(model->between, options);
      fully_shard(model, options);
      if (by_lists) set_backward_prefetch(model->twice, {model->between, model->first});
      for (int step = 0; step < 3; ++step) {
        forget_gradients(model);
        loss_of(model(my_rows(batch, rank, size), rank == 1)).backward();
        expect_equal_gradients(model, reference, 1e-12, str("prefetch ", prefetch));
        EXPECT_EQ(fsdp_stats(model).gathered_groups, 0);
      }
    }
}

TEST(FsdpEnginePrefetch, RefusesModulesThatWereNotSharded) {
  const DataLayout layout{1, testing::world().size()};
  Toy model = sharded_toy({}, at::kFloat, {.mesh = mesh_of(layout)});
  Toy plain(ToyOptions{}, at::kFloat);
  EXPECT_THROW(set_forward_prefetch(model->blocks[0], {plain->blocks[1]}), Error);
  EXPECT_THROW(set_backward_prefetch(plain->blocks[0], {}), Error);
  EXPECT_THROW(fully_shard(plain, {.mesh = mesh_of(layout), .prefetch = -1}), Error);
  Toy other = sharded_toy({}, at::kFloat, {.mesh = mesh_of(layout)});
  set_forward_prefetch(model->blocks[0], {other->blocks[1]});
  EXPECT_THROW(model(input_rows(2, 6, at::kFloat)), Error) << "of another root";
}

TEST(FsdpEngineMemory, CountsKeptGradients) {
  const int size = testing::world().size();
  for (const bool reduce_every : {true, false}) {
    Toy model = sharded_toy({.dim = 64, .hidden = 64}, at::kFloat,
                            {.mesh = mesh_of({1, size}), .reduce_every_micro_batch = reduce_every});
    const double whole = (3 * (2 * 64 * 64 + 64) + 64) * 4;
    const double kept = static_cast<double>(fsdp_stats(model).kept_gradient_bytes);
    if (reduce_every || size == 1) {
      EXPECT_EQ(kept, 0);
    } else {
      EXPECT_GE(kept, whole);
      EXPECT_LE(kept, 1.1 * whole) << "padding";
    }
  }
}

TEST(FsdpEngineShards, AreOneNthAndStartFromTheGivenValues) {
  const int size = testing::world().size();
  const ToyOptions options{.dim = 16, .hidden = 7};
  Toy reference(options, at::kFloat);
  Toy model = sharded_toy(options, at::kFloat, {.mesh = mesh_of({1, size}), .param_dtype = at::kBFloat16});
  const auto expected = reference->named_parameters();
  for (const Parameter& parameter : parameters(model)) {
    EXPECT_EQ(parameter.data.local.scalar_type(), at::kFloat);
    EXPECT_EQ(parameter.compute.scalar_type(), at::kBFloat16);
    EXPECT_TRUE(at::equal(full_tensor(parameter.data), expected[parameter.name])) << parameter.name;
  }
}

/// Two branches, of which each rank takes one, and an embedding whose weight is also the output's.
class BranchesImpl : public nn::Module {
 public:
  explicit BranchesImpl(at::ScalarType dtype) {
    const auto options = options_of(dtype);
    table = register_parameter("table", testing::BlockImpl::values({10, 6}, options));
    even = register_parameter("even", testing::BlockImpl::values({6, 6}, options));
    odd = register_parameter("odd", testing::BlockImpl::values({6, 6}, options) * 0.7);
  }
  at::Tensor forward(const at::Tensor& tokens, int rank) {
    const at::Tensor h = at::linear(at::embedding(table, tokens), rank % 2 == 0 ? even : odd);
    return at::linear(h, table);  // tied
  }
  at::Tensor table, even, odd;
};
TITAN_MODULE(Branches);

TEST(FsdpEngineUnused, MayDifferBetweenRanksAndTiedGradientsAreSummedOnce) {
  const int size = testing::world().size(), rank = testing::world().rank();
  const auto tokens_of = [](int r) { return at::arange(4, options_of(at::kLong)) * (r + 1) % 10; };
  Branches reference(at::kDouble);
  for (int r = 0; r < size; ++r) loss_of(reference(tokens_of(r), r)).backward();
  for (const DataLayout& layout : layouts(size)) {
    Branches model(at::kDouble);
    fully_shard(model, {.mesh = mesh_of(layout)});
    for (int step = 0; step < 2; ++step) {
      for (const Parameter& parameter : parameters(model)) parameter.data.local.mutable_grad().reset();
      loss_of(model(tokens_of(rank), rank)).backward();
    }
    for (const Parameter& parameter : parameters(model)) {
      DTensor grad = parameter.data;
      ASSERT_TRUE(grad.local.grad().defined()) << parameter.name;
      grad.local = grad.local.grad();
      const at::Tensor& wanted = reference->named_parameters()[parameter.name].grad();
      EXPECT_LE(relative_error(full_tensor(grad),
                               wanted.defined() ? wanted : at::zeros({6, 6}, options_of(at::kDouble))),
                1e-12)
          << parameter.name;
    }
  }
}

TEST(FsdpEngineStale, NextForwardSeesWritesToShards) {
  const int size = testing::world().size();
  const at::Tensor x = input_rows(2, 6, at::kFloat);
  for (const auto param_dtype : {at::kFloat, at::kBFloat16}) {
    for (const DataLayout& layout : layouts(size)) {
      Toy model = sharded_toy({}, at::kFloat,
                              {.mesh = mesh_of(layout),
                               .param_dtype = param_dtype,
                               .reshard_after_forward = ReshardAfterForward::never()});
      at::NoGradGuard no_grad;
      EXPECT_GT(model(x).abs().sum().item<double>(), 0);
      for (const Parameter& parameter : parameters(model)) parameter.data.local.zero_();
      EXPECT_EQ(model(x).abs().sum().item<double>(), 0)
          << "param dtype " << param_dtype << " shard " << layout.shard;
    }
  }
}

// Also for whole shards, as on one rank and in DDP, whose casts are freed like gathered copies.
TEST(FsdpEngineCast, IsFreedAfterUse) {
  const int size = testing::world().size();
  const at::Tensor x = input_rows(2, 6, at::kFloat);
  for (const bool keeps : {false, true}) {
    Toy model = sharded_toy(
        {}, at::kFloat,
        {.mesh = mesh_of({.replicate = size, .shard = 1}),
         .param_dtype = at::kBFloat16,
         .reshard_after_forward = keeps ? ReshardAfterForward::never() : ReshardAfterForward::always()});
    for (int step = 0; step < 3; ++step) {
      const at::Tensor loss = model(x).abs().sum();
      const FsdpStats stats = fsdp_stats(model);
      EXPECT_GT(stats.groups, 0);
      EXPECT_EQ(stats.gathered_groups, keeps ? stats.groups : 0) << "step " << step;
      loss.backward();
      EXPECT_EQ(fsdp_stats(model).gathered_groups, 0) << "step " << step;
    }
  }
}

// The outermost group computes in bf16 and returns exactly the same values in another dtype; gradients pass
// back through the cast.
TEST(FsdpEngineOutput, HasTheRequestedDtype) {
  const int size = testing::world().size(), rank = testing::world().rank();
  const ToyOptions options{.num_blocks = 1};
  const at::Tensor rows = my_rows(input_rows(12, options.dim, at::kFloat), rank, size);
  const auto sharded = [&](std::optional<at::ScalarType> output_dtype) {
    Toy model(options, at::kFloat);
    FsdpOptions fsdp{.mesh = mesh_of({1, size}), .param_dtype = at::kBFloat16};
    fully_shard(model->blocks[0], fsdp);
    fsdp.output_dtype = output_dtype;
    fully_shard(model, fsdp);
    materialize(model, 0);
    return model;
  };
  Toy as_computed = sharded({}), cast = sharded(at::kFloat);
  const at::Tensor narrow = as_computed(rows), wide = cast(rows);
  EXPECT_EQ(narrow.scalar_type(), at::kBFloat16);
  ASSERT_EQ(wide.scalar_type(), at::kFloat);
  EXPECT_TRUE(at::equal(wide, narrow.to(at::kFloat)));
  loss_of(narrow.to(at::kFloat)).backward();
  loss_of(wide).backward();
  const std::vector<Parameter> expected = parameters(as_computed), got = parameters(cast);
  for (size_t i = 0; i < got.size(); ++i)
    EXPECT_TRUE(at::equal(got[i].data.local.grad(), expected[i].data.local.grad())) << got[i].name;
}

TEST(FsdpEngineMisuse, RefusesAnOptimizerOverComputeParameters) {
  const int size = testing::world().size();
  Toy model = sharded_toy({}, at::kFloat, {.mesh = mesh_of({1, size})});
  try {
    torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-3));
    FAIL() << "LibTorch's optimizer accepted them";
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what()).find("can't optimize a non-leaf Tensor"), std::string::npos)
        << error.what();
  }
}

TEST(FsdpEngineMisuse, IsReported) {
  const int size = testing::world().size();
  Toy model = sharded_toy({}, at::kFloat, {.mesh = mesh_of({1, size})});
  model(input_rows(2, 6, at::kFloat));
  torch::nn::Sequential of_libtorch(model->blocks[1].ptr());
  const std::function<void()> other_roads[] = {
      [&] { model->blocks[1]->forward(input_rows(2, 6, at::kFloat)); },
      [&] { of_libtorch->forward(input_rows(2, 6, at::kFloat)); }};
  for (const auto& enter : other_roads) {
    try {
      enter();
      FAIL() << "a forward without nn::Ref was accepted";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("'block1'"), std::string::npos) << error.what();
    }
  }
  EXPECT_THROW(model->to(at::kDouble), Error);
  EXPECT_THROW(fully_shard(model, {.mesh = mesh_of({1, size})}), Error);
}

}  // namespace
}  // namespace titan
