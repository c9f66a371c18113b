// A signal to one rank is known to all behind the same count of tokens, however the ranks are laid out.

#include "titan/train/stop_agreement.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <thread>

#include "dist/flight_record.h"
#include "distributed/world.h"
#include "titan/core/error.h"
#include "titan/dist/collectives.h"
#include "train/policies/interruption.h"

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

// Rows that take longer than the first look at the store.
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

TEST(StopAgreement, AnyRankStopsAll) {
  for (const ParallelDims& dims : layouts()) {
    const Meshes meshes = build_meshes(world(), dims);
    for (int asks = 0; asks < world().size(); ++asks) {
      const SignalWatch watch;
      StopAgreement stop(world(), meshes);
      for (int step = 0; step < 3; ++step) {
        const TokenCounts counts = stop.count({batch_of(5), batch_of(meshes.batch.rank())});
        const int ranks = meshes.batch.size();
        EXPECT_EQ(counts.local, 5 + meshes.batch.rank());
        EXPECT_EQ(counts.global, 5 * ranks + ranks * (ranks - 1) / 2) << name_of(dims);
        EXPECT_FALSE(stop.agreed());
      }
      if (world().rank() == asks) send_to_myself(SIGUSR1);
      static_cast<void>(stop.count({batch_of(1)}));
      EXPECT_TRUE(stop.agreed()) << name_of(dims) << ", asked by " << asks;
      const StopCause cause = stop.cause();
      EXPECT_EQ(cause.signal, SIGUSR1);
      EXPECT_EQ(cause.rank, asks);
    }
  }
}

// Whoever asks to stop meanwhile.
TEST(StopAgreement, ARankThatFailsIsKnownToAll) {
  for (const ParallelDims& dims : layouts()) {
    const Meshes meshes = build_meshes(world(), dims);
    for (int fails = 0; fails < world().size(); ++fails) {
      const SignalWatch watch;
      StopAgreement stop(world(), meshes);
      EXPECT_FALSE(stop.agree());
      EXPECT_FALSE(stop.any_fails());
      if (world().rank() == 0) send_to_myself(SIGUSR1);
      static_cast<void>(stop.count({batch_of(1)}, /*fails=*/world().rank() == fails));
      EXPECT_TRUE(stop.any_fails()) << name_of(dims) << ", of rank " << fails;
      EXPECT_FALSE(stop.agreed());
    }
  }
}

TEST(StopAgreement, TheLowestRankOfSeveralIsNamed) {
  const SignalWatch watch;
  StopAgreement stop(world(), build_meshes(world(), {.dp_shard = world().size()}));
  if (world().rank() > 0) send_to_myself(SIGTERM);
  EXPECT_EQ(stop.agree(), world().size() > 1);
  if (world().size() == 1) return;
  EXPECT_EQ(stop.cause().rank, 1);
  EXPECT_EQ(stop.cause().signal, SIGTERM);
  EXPECT_FALSE(stop.cause().by_launcher);
}

TEST(StopAgreement, ThatALauncherSentItIsKnownToAll) {
  const bool is_sender = world().rank() == world().size() - 1;
  const SignalWatch watch(is_sender ? ::getpid() : 0);
  StopAgreement stop(world(), build_meshes(world(), {.dp_shard = world().size()}));
  send_to_myself(SIGTERM);
  EXPECT_TRUE(stop.agree());
  EXPECT_EQ(stop.cause().rank, 0);
  EXPECT_TRUE(stop.cause().by_launcher);
}

// Nothing is noted where nobody watches: a program of one's own keeps its signals.
TEST(StopAgreement, WithoutAWatchNobodyIsAsked) {
  StopAgreement stop(world(), build_meshes(world(), {.dp_shard = world().size()}));
  EXPECT_FALSE(stop.agree());
}

// A job may train twice: what one was asked is no request to the next.
TEST(StopAgreement, TheNextOneWasntAsked) {
  const Meshes meshes = build_meshes(world(), {.dp_shard = world().size()});
  {
    const SignalWatch watch;
    StopAgreement first(world(), meshes);
    if (world().rank() == 0) send_to_myself(SIGTERM);
    EXPECT_TRUE(first.agree());
    world().everyone()->barrier({"test::stop"}).wait();
    std::this_thread::sleep_for(
        std::chrono::milliseconds(200));  // for the watch's thread, which tells the store
  }
  const SignalWatch watch;
  StopAgreement next(world(), meshes);
  data::DataLoader loader = slow_loader();
  EXPECT_TRUE(next.wait_for(loader));
  EXPECT_FALSE(next.agree());
}

// Over data-parallel ranks nothing but what a step exchanges anyway, else a call along each further axis.
TEST(StopAgreement, CostsACallAnAxis) {
  for (const ParallelDims& dims : layouts()) {
    const Meshes meshes = build_meshes(world(), dims);
    StopAgreement stop(world(), meshes);
    const std::vector<data::Batch> batches = {batch_of(5)};
    const auto calls_of = [&](const std::function<void()>& part) {
      const uint64_t before = world().recorder().num_calls();
      part();
      return world().recorder().num_calls() - before;
    };
    const uint64_t plain = calls_of([&] { count_valid_tokens(batches, meshes.batch); });
    const uint64_t agreed = calls_of([&] { static_cast<void>(stop.count(batches)); });
    const int axes = (dims.row_degree() > 1) + (dims.tp > 1) + (dims.pp > 1);
    EXPECT_EQ(agreed, plain + static_cast<uint64_t>(axes)) << name_of(dims);
  }
}

}  // namespace
}  // namespace titan::train
