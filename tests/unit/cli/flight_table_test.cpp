// The ranks' last calls side by side, from the records that ranks leave.

#include "cli/debug/commands.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "titan/core/error.h"

namespace titan::cli {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int64_t kMs = 1'000'000;

/// Records that ranks wrote at 100 s. All ranks are in one group.
class FlightTable : public ::testing::Test {
 protected:
  void add_rank(int rank, int world_size = 3) {
    dist::FlightFile file;
    file.rank = rank;
    file.world_size = world_size;
    file.host = str("node", rank);
    file.reason = "request";
    file.time_ns = 100'000 * kMs;
    file.is_titan = true;
    std::vector<int> ranks(static_cast<size_t>(world_size));
    std::iota(ranks.begin(), ranks.end(), 0);
    file.groups = {{"fsdp", "", ranks}};
    files_.push_back(file);
  }

  /// Adds a call to the rank that was added last. It began at 98 s and took `took_ms`; kWaits: it still
  /// waits.
  dist::FlightCall& add_call(int64_t sequence, int64_t took_ms) {
    dist::FlightCall call;
    call.record = call.sequence = sequence;
    call.op = "all_gather";
    call.phase = "fsdp::unshard";
    call.module = "layers.5";
    call.in_sizes = {{4, 8}};
    call.out_sizes = {{12, 8}};
    call.dtypes = {"Float"};
    call.start_ns = 98'000 * kMs;
    call.end_ns = took_ms < 0 ? 0 : call.start_ns + took_ms * kMs;
    call.state = took_ms < 0 ? dist::FlightState::Waiting : dist::FlightState::Finished;
    return files_.back().calls.emplace_back(call);
  }

  std::string calls(const FlightTableOptions& options = {}) const {
    return flight_calls_table(files_, dist::make_flight_report(files_), options);
  }

  static constexpr int64_t kWaits = -1;
  std::vector<dist::FlightFile> files_;
};

TEST_F(FlightTable, MarksAMissingRank) {
  for (const int rank : {0, 1, 2}) {
    add_rank(rank);
    add_call(811, 12 + rank);
    if (rank != 1) add_call(812, kWaits);
  }
  EXPECT_EQ(
      calls(),
      "\ngroup 'fsdp', its collectives:\n"
      "  #  operation   in                      of                     rank 0       rank 1   rank 2\n"
      "811  all_gather  fsdp::unshard layers.5  Float [4,8] to [12,8]  12.0 ms      13.0 ms  14.0 ms\n"
      "812  all_gather  fsdp::unshard layers.5  Float [4,8] to [12,8]  waits 2.0 s  MISSING  waits 2.0 s\n");
}

// The ring of rank 1 begins later, and rank 2 left no record.
TEST_F(FlightTable, MarksUnknownCalls) {
  add_rank(0);
  add_call(811, 12);
  add_call(812, kWaits);
  add_rank(1);
  add_call(812, kWaits).state = dist::FlightState::Failed;
  const std::string text = calls();
  EXPECT_THAT(text, HasSubstr("12.0 ms      left the ring  no record\n"));
  EXPECT_THAT(text, HasSubstr("waits 2.0 s  failed         no record\n"));
}

// A device's call is found finished half a second later or so.
TEST_F(FlightTable, ShowsTheTimeOnTheDevice) {
  add_rank(0);
  add_call(811, 530).device_ns = 7 * kMs;
  add_call(812, kWaits);
  add_rank(1);
  add_call(811, 530);
  EXPECT_THAT(calls(), HasSubstr("  7.0 ms  "));
}

TEST_F(FlightTable, ShowsACallThatDiffers) {
  for (const int rank : {0, 1, 2}) {
    add_rank(rank);
    auto& call = add_call(812, kWaits);
    if (rank != 2) continue;
    call.op = "broadcast";
    call.phase = "odd::one";
    call.module = "more";
    call.in_sizes = call.out_sizes = {{7}};
  }
  EXPECT_THAT(calls(),
              HasSubstr("  waits 2.0 s  waits 2.0 s  waits 2.0 s (broadcast odd::one more Float [7])\n"));
}

// Shows the calls up to the one in question and the two after it, in the requested columns.
TEST_F(FlightTable, SelectsRowsAndColumns) {
  for (const int rank : {0, 1, 2}) {
    add_rank(rank);
    for (int64_t sequence = 800; sequence <= 811; ++sequence) add_call(sequence, 1);
    if (rank != 1) add_call(812, kWaits);
  }
  const std::string text = calls({.num_calls = 2, .ranks = {1}});
  EXPECT_THAT(text,
              AllOf(HasSubstr("rank 1"), Not(HasSubstr("rank 0")), HasSubstr("\n811 "), HasSubstr("\n812 "),
                    Not(HasSubstr("\n810 ")), HasSubstr("  and 2 more ranks (choose them with --ranks)\n")));
  const std::string usual = calls();
  EXPECT_THAT(usual, AllOf(HasSubstr("\n803 "), Not(HasSubstr("\n802 "))));
}

TEST_F(FlightTable, GivesCulpritsAColumnAmongManyRanks) {
  for (int rank = 0; rank < 20; ++rank) {
    add_rank(rank, 20);
    add_call(811, 1);
    if (rank != 17) add_call(812, kWaits);
  }
  EXPECT_THAT(calls(), AllOf(HasSubstr("rank 6 "), Not(HasSubstr("rank 7 ")), HasSubstr("rank 17"),
                             HasSubstr("MISSING"), HasSubstr("  and 12 more ranks")));
}

TEST_F(FlightTable, ShowsWhatEachRankIsDoing) {
  add_rank(0);
  add_call(811, 1);
  files_.back().activity = "data";
  files_.back().step = 120;
  files_.back().activity_since_ns = 88'000 * kMs;
  add_rank(1);
  const std::string text = flight_records_table(files_);
  EXPECT_THAT(text, HasSubstr("  data, step 120, for 12.0 s  1      request\n"));
  EXPECT_THAT(text, HasSubstr("  -                           0      request\n"));
}

TEST_F(FlightTable, SaysThatThereAreNoCalls) {
  add_rank(0);
  EXPECT_EQ(calls(), "\nNo calls are recorded.\n");
}

}  // namespace
}  // namespace titan::cli
