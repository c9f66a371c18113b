// All ranks learn of a signal to one of them after the same count of tokens, on every layout.

#include "train/policies/fault_tolerance.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <bit>
#include <chrono>
#include <cmath>
#include <functional>
#include <limits>
#include <thread>

#include "dist/flight_record.h"
#include "distributed/world.h"
#include "titan/core/error.h"
#include "titan/dist/collectives.h"
#include "train/policies/interruption.h"
#include "train/step_runner.h"

namespace titan::train {
namespace {

using titan::testing::world;

std::vector<ParallelDims> layouts() {
  const int size = world().size();
  std::vector<ParallelDims> all = {{.dp_shard = size}};
  if (size > 1)
    all.insert(all.end(), {{.dp_replicate = size}, {.rows = {{"cp", size}}}, {.tp = size}, {.pp = size}});
  if (size == 4)
    all.insert(all.end(),
               {{.dp_shard = 2, .tp = 2}, {.dp_replicate = 2, .pp = 2}, {.rows = {{"cp", 2}}, .pp = 2}});
  return all;
}

std::string name_of(const ParallelDims& dims) {
  return str("pp ", dims.pp, ", dp ", dims.dp_replicate, " x ", dims.dp_shard, ", cp ", dims.row_degree(),
             ", tp ", dims.tp);
}

data::Batch batch_of(int64_t valid_tokens) {
  data::Batch batch;
  batch.valid_tokens = valid_tokens;
  return batch;
}

void send_to_myself(int signal) {
  ::kill(::getpid(), signal);
  for (int i = 0; i < 5000 && noted_signal() == 0; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

// Rows that take longer than the first check of the store.
class SlowFeed : public data::Feed {
 public:
  void check_shape(int64_t, int64_t) const override {}
  data::LaneState start(int64_t lane, int64_t) const override { return {.lane = lane}; }
  std::unique_ptr<data::Lane> open(const data::LaneState& state, int64_t) const override {
    return std::make_unique<SlowLane>(state);
  }
  std::vector<data::LaneState> redeal(const std::vector<data::LaneState>& lanes, int64_t) const override {
    return lanes;
  }
  std::string fingerprint() const override { return "slow"; }

 private:
  struct SlowLane : data::Lane {
    explicit SlowLane(const data::LaneState& state) : state_(state) {}
    int64_t fill(data::Row row) override {
      std::this_thread::sleep_for(std::chrono::milliseconds(1500));
      return static_cast<int64_t>(row.labels.size());
    }
    data::LaneState state() const override { return state_; }
    data::LaneState state_;
  };
};

data::DataLoader slow_loader() {
  return {std::make_shared<SlowFeed>(),
          {.dp_rank = world().rank(),
           .dp_size = world().size(),
           .local_batch_size = 1,
           .seq_len = 4,
           .settings = {.prefetch_factor = 1}}};
}

// Counts tokens as the trainer does at the beginning of a step.
Agreement count(StopOnSignal& stop, const Meshes& meshes, const std::vector<data::Batch>& batches = {}) {
  return agree(batches, {.vote = stop.vote()}, meshes, world());
}

TEST(StopAgreement, AnyRankStopsAll) {
  for (const ParallelDims& dims : layouts()) {
    const Meshes meshes = build_meshes(world(), dims);
    for (int asks = 0; asks < world().size(); ++asks) {
      const SignalWatch watch;
      StopOnSignal stop(world());
      for (int step = 0; step < 3; ++step) {
        const Agreement agreed = count(stop, meshes, {batch_of(5), batch_of(meshes.batch.rank())});
        const int ranks = meshes.batch.size();
        EXPECT_EQ(agreed.tokens.local, 5 + meshes.batch.rank());
        EXPECT_EQ(agreed.tokens.global, 5 * ranks + ranks * (ranks - 1) / 2) << name_of(dims);
        EXPECT_EQ(agreed.vote, Vote::Go);
      }
      if (world().rank() == asks) send_to_myself(SIGUSR1);
      EXPECT_EQ(count(stop, meshes, {batch_of(1)}).vote, Vote::Stop)
          << name_of(dims) << ", asked by " << asks;
      const StopCause cause = stop.stop_cause().value();
      EXPECT_EQ(cause.signal, SIGUSR1);
      EXPECT_EQ(cause.rank, asks);
    }
  }
}

// Also while another rank asks to stop.
TEST(StopAgreement, AllRanksLearnOfAFailure) {
  for (const ParallelDims& dims : layouts()) {
    const Meshes meshes = build_meshes(world(), dims);
    for (int fails = 0; fails < world().size(); ++fails) {
      const SignalWatch watch;
      StopOnSignal stop(world());
      EXPECT_EQ(count(stop, meshes).vote, Vote::Go);
      if (world().rank() == 0) send_to_myself(SIGUSR1);
      const Vote mine = world().rank() == fails ? Vote::Fail : stop.vote();
      EXPECT_EQ(agree({batch_of(1)}, {.vote = mine}, meshes, world()).vote, Vote::Fail)
          << name_of(dims) << ", of rank " << fails;
    }
  }
}

TEST(StopAgreement, NamesTheLowestOfSeveralRanks) {
  const SignalWatch watch;
  StopOnSignal stop(world());
  const Meshes meshes = build_meshes(world(), {.dp_shard = world().size()});
  if (world().rank() > 0) send_to_myself(SIGTERM);
  EXPECT_EQ(count(stop, meshes).vote == Vote::Stop, world().size() > 1);
  if (world().size() == 1) return;
  EXPECT_EQ(stop.stop_cause()->rank, 1);
  EXPECT_EQ(stop.stop_cause()->signal, SIGTERM);
  EXPECT_FALSE(stop.stop_cause()->by_launcher);
}

TEST(StopAgreement, AllRanksLearnThatALauncherSentIt) {
  const bool is_sender = world().rank() == world().size() - 1;
  const SignalWatch watch(is_sender ? ::getpid() : 0);
  StopOnSignal stop(world());
  const Meshes meshes = build_meshes(world(), {.dp_shard = world().size()});
  send_to_myself(SIGTERM);
  EXPECT_EQ(count(stop, meshes).vote, Vote::Stop);
  EXPECT_EQ(stop.stop_cause()->rank, 0);
  EXPECT_TRUE(stop.stop_cause()->by_launcher);
}

// Without a watch nothing is recorded: a user's program keeps its own signal handling.
TEST(StopAgreement, IgnoresSignalsWithoutAWatch) {
  StopOnSignal stop(world());
  const Meshes meshes = build_meshes(world(), {.dp_shard = world().size()});
  EXPECT_EQ(count(stop, meshes).vote, Vote::Go);
}

// A job may train twice: a request to the first trainer doesn't apply to the next.
TEST(StopAgreement, DoesNotCarryOverToTheNextTrainer) {
  const Meshes meshes = build_meshes(world(), {.dp_shard = world().size()});
  {
    const SignalWatch watch;
    StopOnSignal first(world());
    if (world().rank() == 0) send_to_myself(SIGTERM);
    EXPECT_EQ(count(first, meshes).vote, Vote::Stop);
    world().everyone()->barrier({"test::stop"}).wait();
    // Gives the watch's thread time to write to the store.
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
  }
  const SignalWatch watch;
  StopOnSignal next(world());
  data::DataLoader loader = slow_loader();
  while (!loader.wait(std::chrono::milliseconds(100))) EXPECT_FALSE(next.gives_up_waiting());
  EXPECT_EQ(count(next, meshes).vote, Vote::Go);
}

// The tokens, and whether a rank asks to stop, are exchanged at once on any layout.
TEST(StopAgreement, CostsOneCall) {
  for (const ParallelDims& dims : layouts()) {
    const Meshes meshes = build_meshes(world(), dims);
    StopOnSignal stop(world());
    const uint64_t before = world().recorder().num_calls();
    count(stop, meshes, {batch_of(5)});
    EXPECT_EQ(world().recorder().num_calls() - before, world().size() > 1 ? 1u : 0u) << name_of(dims);
  }
}

// In one call, with the counts of a step that is logged or alone.
TEST(StopAgreement, BringsTheFiguresOfAllRanksToTheBit) {
  const Meshes meshes = build_meshes(world(), {.dp_shard = world().size()});
  const auto figures_of = [](int rank) {
    return std::vector{-0.0, std::nextafter(1.0 + rank, 9), std::nan("5"),
                       -rank * std::numeric_limits<double>::denorm_min()};
  };
  std::vector<int64_t> expected;
  for (int rank = 0; rank < world().size(); ++rank)
    for (const double figure : figures_of(rank)) expected.push_back(std::bit_cast<int64_t>(figure));
  for (const std::optional<int64_t> seen : {std::optional<int64_t>(), std::optional<int64_t>(7)}) {
    const uint64_t before = world().recorder().num_calls();
    const Agreement agreed =
        agree({batch_of(2)}, {.tokens_seen = seen, .figures = figures_of(world().rank())}, meshes, world());
    EXPECT_EQ(world().recorder().num_calls() - before, world().size() > 1 ? 1u : 0u);
    std::vector<int64_t> bits;
    for (const double figure : agreed.figures) bits.push_back(std::bit_cast<int64_t>(figure));
    EXPECT_EQ(bits, expected);
    EXPECT_EQ(agreed.tokens.global, 2 * world().size());
    ASSERT_EQ(agreed.tokens.ranks.size(), seen ? static_cast<size_t>(world().size()) : 0u);
    for (const RankTokens& rank : agreed.tokens.ranks) EXPECT_EQ(rank.seen, 7);
  }
}

// Any rank's: the last one's alone, too.
TEST(StopAgreement, DropsARecordingOnAllRanks) {
  for (const ParallelDims& dims : layouts()) {
    const Meshes meshes = build_meshes(world(), dims);
    for (const bool any : {false, true}) {
      const bool mine = any && world().rank() + 1 == world().size();
      const Agreement agreed = agree({batch_of(3)}, {.drops_graph = mine}, meshes, world());
      EXPECT_EQ(agreed.drops_graph, any) << name_of(dims);
      EXPECT_EQ(agreed.vote, Vote::Go);
    }
  }
}

TEST(SumOverRanks, CountsEachLossAndTokenOnce) {
  for (const ParallelDims& dims : layouts()) {
    const Meshes meshes = build_meshes(world(), dims);
    const int rows = meshes.batch.rank(), num_rows = meshes.batch.size();
    const uint64_t before = world().recorder().num_calls();
    const TokenCounts tokens =
        agree({batch_of(10 + rows)}, {.tokens_seen = 100 + rows}, meshes, world()).tokens;
    EXPECT_EQ(world().recorder().num_calls() - before, world().size() > 1 ? 1u : 0u) << name_of(dims);
    EXPECT_EQ(tokens.local, 10 + rows);
    EXPECT_EQ(tokens.global, 10 * num_rows + num_rows * (num_rows - 1) / 2) << name_of(dims);
    // The last stage's ranks have the loss, each that of its part of the rows: 1, 2, ... for the rows.
    const bool has_loss = meshes.pp.rank() + 1 == meshes.pp.size();
    const at::Tensor mine =
        at::scalar_tensor(has_loss ? (1.0 + rows) / meshes.rows.size() : 0.0, at::kDouble).view({1});
    at::Tensor all = at::empty({world().size()}, mine.options());
    world().everyone()->all_gather(all, mine, {"test::losses"}).wait();
    const std::vector<double> losses(all.const_data_ptr<double>(),
                                     all.const_data_ptr<double>() + all.numel());
    const StepSums sums = sum_over_ranks(losses, tokens);
    EXPECT_DOUBLE_EQ(sums.loss, num_rows * (num_rows + 1) / 2.0) << name_of(dims);
    EXPECT_EQ(sums.tokens_seen, 100 * num_rows + num_rows * (num_rows - 1) / 2) << name_of(dims);
    const double highest = static_cast<double>(num_rows) / (10 + num_rows - 1);
    EXPECT_DOUBLE_EQ(sums.max_loss, highest * static_cast<double>(tokens.global)) << name_of(dims);
    EXPECT_EQ(sum_over_ranks(losses, {.ranks = tokens.ranks}).max_loss, sums.loss) << name_of(dims);
    // The highest of losses below 0, and a NaN of the first rows, are found, however many ranks share rows.
    std::vector<double> others = losses;
    for (double& loss : others) loss = -loss;
    EXPECT_LT(sum_over_ranks(others, tokens).max_loss, 0) << name_of(dims);
    for (size_t rank = 0; rank < others.size(); ++rank)
      if (tokens.ranks[rank].rows == 0) others[rank] = std::nan("");
    EXPECT_TRUE(std::isnan(sum_over_ranks(others, tokens).max_loss)) << name_of(dims);
  }
}

}  // namespace
}  // namespace titan::train
