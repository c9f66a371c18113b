// fully_shard in unusual steps: other paths, several backwards, and exceptions.

#include <array>
#include <string_view>

#include "dist/flight_record.h"
#include "distributed/toy_case.h"
#include "parallel/fsdp/fsdp_state.h"
#include "parallel/pipeline_runtime.h"

namespace titan {
namespace {

using namespace testing;  // NOLINT: the test's own names

constexpr double kTolerance = 1e-12;

class FsdpPaths : public ::testing::Test {
 protected:
  static constexpr ToyOptions kOptions{.num_blocks = 4};
  int size = world().size(), rank = world().rank();
  at::Tensor batch = input_rows(12, kOptions.dim, at::kDouble);
  at::Tensor mine = my_rows(batch, rank, size);

  FsdpOptions fsdp(bool reduce_every = true) const {
    return {.mesh = mesh_of(layouts(size).front()), .reduce_every_micro_batch = reduce_every};
  }
};

// A prefetch for a block that isn't called must not be used in the next step.
TEST_F(FsdpPaths, SkippedBlocksGatherDoesNotOutliveTheOptimizerStep) {
  Toy reference(kOptions, at::kDouble), model = sharded_toy(kOptions, at::kDouble, fsdp());
  for (int step = 0; step < 4; ++step) {
    reference->path.skipped = model->path.skipped = step == 1 ? 2 : -1;
    reference->zero_grad();
    forget_gradients(model);
    loss_of(reference(batch)).backward();
    loss_of(model(mine)).backward();
    expect_equal_gradients(model, reference, kTolerance, str("step ", step));
    EXPECT_EQ(fsdp_stats(model).gathered_groups, 0) << step;
    at::NoGradGuard no_grad;
    for (at::Tensor& parameter : reference->parameters()) parameter.mul_(0.9);
    for (const Parameter& parameter : parameters(model)) parameter.data.local.mul_(0.9);
  }
}

TEST_F(FsdpPaths, OneForwardMayHaveTwoBackwards) {
  Toy reference(kOptions, at::kDouble), model = sharded_toy(kOptions, at::kDouble, fsdp());
  for (int step = 0; step < 2; ++step) {
    reference->zero_grad();
    forget_gradients(model);
    const auto two_losses = [](const at::Tensor& y) {
      loss_of(y).backward({}, /*retain_graph=*/true);
      y.sum().backward();
    };
    two_losses(reference(batch));
    two_losses(model(mine));
    expect_equal_gradients(model, reference, kTolerance, str("step ", step));
  }
}

// The ranks' backwards differ, so each rank gathers and reduces the blocks that it skips for the others. Several blocks
// follow those that are skipped: the ranks may get that far apart.
TEST_F(FsdpPaths, RanksMayUseDifferentBlocks) {
  constexpr ToyOptions kDeep{.num_blocks = 7};
  const auto path = [](int r) { return std::array{-1, 5, 3}[static_cast<size_t>(r % 3)]; };
  for (const int prefetch : {0, 1, 3}) {
    FsdpOptions options = fsdp();
    options.prefetch = prefetch;
    Toy reference(kDeep, at::kDouble), model = sharded_toy(kDeep, at::kDouble, options);
    model->path.detached = path(rank);
    for (int step = 0; step < 3; ++step) {
      reference->zero_grad();
      forget_gradients(model);
      for (int r = 0; r < size; ++r) {
        reference->path.detached = path(r);
        loss_of(reference(my_rows(batch, r, size))).backward();
      }
      loss_of(model(mine)).backward();
      expect_equal_gradients(model, reference, kTolerance, str("prefetch ", prefetch, " step ", step));
    }
  }
}

// The block's gradient from earlier micro-batches must be reduced in the last one, which doesn't run the
// block.
TEST_F(FsdpPaths, LastMicroBatchMaySkipABlock) {
  for (const DataLayout& layout : layouts(size)) {
    for (const bool reduce_every : {true, false}) {
      Toy reference(kOptions, at::kDouble);
      Toy model = sharded_toy(kOptions, at::kDouble,
                              {.mesh = mesh_of(layout), .reduce_every_micro_batch = reduce_every});
      for (int step = 0; step < 2; ++step) {
        reference->zero_grad();
        forget_gradients(model);
        for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
          reference->path.skipped = model->path.skipped = micro_batch == 1 ? 1 : -1;
          set_last_micro_batch(model, micro_batch == 1);
          loss_of(reference(batch)).backward();
          loss_of(model(mine)).backward();
        }
        expect_equal_gradients(model, reference, kTolerance,
                               str("shard ", layout.shard, " reduce_every ", reduce_every, " step ", step));
      }
    }
  }
}

int64_t num_reductions() {
  int64_t count = 0;
  for (const dist::CallRecord& call : world().recorder().snapshot())
    count += std::string_view(call.phase) == "fsdp::reduce_scatter";
  return count;
}

// A pipeline's schedule, whose last backward reduces a block while it computes those before it. Rank 1's skips a block.
TEST_F(FsdpPaths, ASchedulesLastBackwardReducesGroupByGroup) {
  if (size == 1) GTEST_SKIP() << "one rank reduces nothing";
  Toy reference(kOptions, at::kDouble), model = sharded_toy(kOptions, at::kDouble, fsdp());
  ScheduledSharding sharding{model};
  for (const bool splits : {false, true}) {
    reference->zero_grad();
    forget_gradients(model);
    for (int micro_batch = 0; micro_batch < 2; ++micro_batch)
      for (int r = 0; r < size; ++r) {
        reference->path.detached = r == 1 ? 2 : -1;
        loss_of(reference(my_rows(batch, r, size))).backward();
      }
    model->path.detached = rank == 1 ? 2 : -1;
    sharding.unshard();
    const at::Tensor first = loss_of(model(mine));
    sharding.set_last_forward(!splits);
    const at::Tensor x = mine.clone().requires_grad_();
    const at::Tensor last = loss_of(model(x));
    sharding.set_last_forward(false);
    DelayedGradients delayed[2];
    if (splits) sharding.delay_weight_gradients(delayed[0]);
    first.backward();
    const int64_t before = num_reductions();
    int64_t by_the_end = 0;
    x.register_hook([&](const at::Tensor&) { by_the_end = num_reductions() - before; });
    if (splits) sharding.delay_weight_gradients(delayed[1]);
    last.backward();
    if (splits) {
      sharding.stop_delaying();
      delayed[0].compute();
      EXPECT_EQ(num_reductions(), before);
      sharding.compute_last(delayed[1]);
    } else {
      EXPECT_GE(by_the_end, rank == 1 ? 1 : kOptions.num_blocks - 1);
      sharding.end_last_backward();
    }
    EXPECT_GE(num_reductions() - before, kOptions.num_blocks);
    sharding.reduce();
    EXPECT_EQ(num_reductions() - before, fsdp_stats(model).groups);
    sharding.finish();
    expect_equal_gradients(model, reference, kTolerance, str("splits ", splits));
  }
}

TEST_F(FsdpPaths, AbandonedStepLeavesNothing) {
  for (const DataLayout& layout : layouts(size)) {
    for (const bool reduce_every : {true, false}) {
      Toy reference(kOptions, at::kDouble);
      Toy model = sharded_toy(kOptions, at::kDouble,
                              {.mesh = mesh_of(layout), .reduce_every_micro_batch = reduce_every});
      set_last_micro_batch(model, false);
      loss_of(model(mine)).backward();
      discard_gradients(model);
      forget_gradients(model);
      set_last_micro_batch(model, true);
      loss_of(reference(batch)).backward();
      loss_of(model(mine)).backward();
      expect_equal_gradients(model, reference, kTolerance,
                             str("shard ", layout.shard, " reduce_every ", reduce_every));
    }
  }
}

TEST_F(FsdpPaths, RecoversFromAForwardThatThrows) {
  Toy reference(kOptions, at::kDouble), model = sharded_toy(kOptions, at::kDouble, fsdp());
  loss_of(reference(batch)).backward();
  for (const int64_t failing : {int64_t{-1}, int64_t{0}, int64_t{2}}) {
    model->path.failing = failing;
    if (failing >= 0) EXPECT_THROW(model(mine), std::runtime_error);
    model->path.failing = -1;
    forget_gradients(model);
    loss_of(model(mine)).backward();
    expect_equal_gradients(model, reference, kTolerance, str("failing ", failing));
    EXPECT_EQ(fsdp_stats(model).gathered_groups, 0);
  }
}

TEST_F(FsdpPaths, RecoversFromABackwardThatThrows) {
  Toy reference(kOptions, at::kDouble), model = sharded_toy(kOptions, at::kDouble, fsdp());
  loss_of(reference(batch)).backward();
  for (int attempt = 0; attempt < 3; ++attempt) {
    model->path.failing_backward = 1;
    EXPECT_THROW(loss_of(model(mine)).backward(), std::runtime_error);
    model->path.failing_backward = -1;
    forget_gradients(model);
    discard_gradients(model);
    loss_of(model(mine)).backward();
    expect_equal_gradients(model, reference, kTolerance, str("attempt ", attempt));
    EXPECT_EQ(fsdp_stats(model).gathered_groups, 0);
  }
}

TEST_F(FsdpPaths, ForwardWithoutGradientsMayRunBetweenForwardAndBackward) {
  for (const auto policy : {ReshardAfterForward{}, ReshardAfterForward::never()}) {
    FsdpOptions options = fsdp();
    options.reshard_after_forward = policy;
    Toy reference(kOptions, at::kDouble), model = sharded_toy(kOptions, at::kDouble, options);
    loss_of(reference(batch)).backward();
    const at::Tensor loss = loss_of(model(mine));
    {
      at::NoGradGuard no_grad;
      model(mine);
    }
    loss.backward();
    expect_equal_gradients(model, reference, kTolerance, "");
  }
}

TEST_F(FsdpPaths, BlocksMayBeRemoved) {
  Toy reference(kOptions, at::kDouble), model = sharded_toy(kOptions, at::kDouble, fsdp());
  for (int step = 0; step < 4; ++step) {
    if (step == 2) {
      for (Toy* toy : {&reference, &model}) {
        (*toy)->unregister_module("block2");
        (*toy)->blocks.erase((*toy)->blocks.begin() + 2);
      }
    }
    reference->zero_grad();
    forget_gradients(model);
    loss_of(reference(batch)).backward();
    loss_of(model(mine)).backward();
    expect_equal_gradients(model, reference, kTolerance, str("step ", step));
  }
}

TEST_F(FsdpPaths, DestroyingTheModelFreesItsGroups) {
  std::vector<std::weak_ptr<fsdp::ParamGroup>> groups;
  {
    Toy model = sharded_toy(kOptions, at::kDouble, fsdp());
    loss_of(model(mine)).backward();
    for (const auto& state : fsdp::states_below(*model)) groups.push_back(state->group());
    EXPECT_EQ(groups.size(), 5u);
  }
  for (const auto& group : groups) EXPECT_TRUE(group.expired());
}

TEST_F(FsdpPaths, RefusesAParameterOfTwoGroups) {
  for (const bool frozen : {false, true}) {
    Toy model(kOptions, at::kDouble);
    if (frozen) model->blocks[0]->bias.set_requires_grad(false);
    model->blocks[1]->register_parameter("shared", model->blocks[0]->bias, !frozen);
    fully_shard(model->blocks[0], fsdp());
    EXPECT_THROW(fully_shard(model->blocks[1], fsdp()), Error) << frozen;
  }
}

}  // namespace
}  // namespace titan
