// Finds which rank is missing from which call, from the records that ranks leave.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "guard/flight_report.h"
#include "titan/core/error.h"

namespace titan::dist {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int64_t kSecond = 1'000'000'000;

/// Records that ranks write at second 100.
class Records {
 public:
  FlightFile& rank(int rank, int world_size = 3) {
    for (FlightFile& file : files_)
      if (file.rank == rank) return file;
    FlightFile file;
    file.rank = rank;
    file.world_size = world_size;
    file.host = "node" + std::to_string(rank);
    file.time_ns = 100 * kSecond;
    file.is_titan = true;
    files_.push_back(file);
    return files_.back();
  }

  FlightCall& call(int rank, const std::string& group, std::vector<int> ranks, int64_t sequence,
                   FlightState state, const std::string& op = "all_gather") {
    FlightFile& file = this->rank(rank);
    size_t index = 0;
    while (index < file.groups.size() && file.groups[index].name != group) ++index;
    if (index == file.groups.size()) file.groups.push_back({group, "", std::move(ranks)});
    FlightCall call;
    call.record = static_cast<int64_t>(file.calls.size());
    call.group = index;
    call.sequence = sequence;
    call.op = op;
    call.phase = "fsdp::unshard";
    call.module = "layers.5";
    call.in_sizes = {{4}};
    call.out_sizes = {{12}};
    call.dtypes = {"Float"};
    call.start_ns = (80 + call.record) * kSecond;
    call.state = state;
    file.calls.push_back(call);
    return file.calls.back();
  }

  FlightReport report(const FlightReportOptions& options = {}) const {
    return make_flight_report(files_, options);
  }

 private:
  std::vector<FlightFile> files_;
};

TEST(FlightReport, NamesARankThatIsElsewhere) {
  Records records;
  for (const int rank : {0, 1, 2}) records.call(rank, "fsdp", {0, 1, 2}, 811, FlightState::Finished);
  for (const int rank : {0, 2}) records.call(rank, "fsdp", {0, 1, 2}, 812, FlightState::Waiting);
  records.rank(1).activity = "data";
  records.rank(1).step = 120;
  records.rank(1).activity_since_ns = 88 * kSecond;
  const FlightReport report = records.report();
  EXPECT_EQ(report.verdict, FlightVerdict::Missing);
  EXPECT_THAT(report.culprits, ElementsAre(1));
  EXPECT_EQ(
      report.summary,
      "rank 1 (host node1) is missing from all_gather #812 of group 'fsdp' (fsdp::unshard layers.5), where "
      "ranks 0, 2 wait for 19.0 s; it is in data of step 120 for 12.0 s; its last call was all_gather "
      "#811 of group 'fsdp' (fsdp::unshard layers.5)");
}

TEST(FlightReport, NamesARankWithoutARecord) {
  Records records;
  for (const int rank : {0, 2}) records.call(rank, "fsdp", {0, 1, 2}, 7, FlightState::Failed);
  const FlightReport report = records.report();
  EXPECT_THAT(report.culprits, ElementsAre(1));
  EXPECT_THAT(report.summary,
              AllOf(HasSubstr("rank 1 is missing from all_gather #7"), HasSubstr("left no record: killed")));
}

// Rank 0 waits for 1, which waits for 2, which loads data: 2 is the culprit.
TEST(FlightReport, FollowsWaitsToTheCulprit) {
  Records records;
  records.call(0, "tp", {0, 1}, 3, FlightState::Waiting);
  records.call(1, "dp", {1, 2}, 9, FlightState::Waiting);
  records.rank(2);
  const FlightReport report = records.report();
  EXPECT_EQ(report.verdict, FlightVerdict::Missing);
  EXPECT_THAT(report.culprits, ElementsAre(2));
  EXPECT_THAT(report.summary, HasSubstr("#9 of group 'dp'"));
}

TEST(FlightReport, FindsRanksThatWaitForEachOther) {
  Records records;
  records.call(0, "a", {0, 1}, 0, FlightState::Waiting);
  records.call(1, "b", {0, 1}, 0, FlightState::Waiting);
  const FlightReport report = records.report();
  EXPECT_EQ(report.verdict, FlightVerdict::Deadlock);
  EXPECT_THAT(report.culprits, ElementsAre(0, 1));
  EXPECT_THAT(report.summary, AllOf(HasSubstr("rank 0 waits in all_gather #0 of group 'a'"),
                                    HasSubstr("rank 1 waits in all_gather #0 of group 'b'")));
}

TEST(FlightReport, FindsDifferentCallsWithTheSameNumber) {
  Records records;
  for (const int rank : {0, 2}) records.call(rank, "fsdp", {0, 1, 2}, 5, FlightState::Waiting);
  records.call(1, "fsdp", {0, 1, 2}, 5, FlightState::Waiting, "reduce_scatter");
  const FlightReport report = records.report();
  EXPECT_EQ(report.verdict, FlightVerdict::Mismatch);
  EXPECT_THAT(report.culprits, ElementsAre(1));
  EXPECT_THAT(report.summary,
              AllOf(HasSubstr("in the operation of a call"), HasSubstr("ranks 0, 2 call all_gather #5"),
                    HasSubstr("rank 1 calls reduce_scatter #5")));
}

TEST(FlightReport, ComparesShapeDtypeAndPlace) {
  const auto summary = [](auto&& change) {
    Records records;
    records.call(0, "fsdp", {0, 1}, 5, FlightState::Waiting);
    change(records.call(1, "fsdp", {0, 1}, 5, FlightState::Waiting));
    return records.report().summary;
  };
  EXPECT_THAT(summary([](FlightCall& call) { call.in_sizes = {{5}}; }),
              AllOf(HasSubstr("in the shape of a call"), HasSubstr("Float [5] to [12]")));
  EXPECT_THAT(summary([](FlightCall& call) { call.dtypes = {"BFloat16"}; }),
              AllOf(HasSubstr("in the dtype of a call"), HasSubstr("BFloat16 [4]")));
  EXPECT_THAT(summary([](FlightCall& call) { call.module = "layers.6"; }),
              AllOf(HasSubstr("in the place in the program"), HasSubstr("fsdp::unshard layers.6")));
}

TEST(FlightReport, FindsAReceiveWithoutItsSend) {
  Records records;
  FlightCall& receive = records.call(1, "pp", {0, 1}, 2, FlightState::Waiting, "receive");
  receive.from = 0;
  receive.to = 1;
  records.rank(0).activity = "forward_backward";
  const FlightReport report = records.report();
  EXPECT_THAT(report.culprits, ElementsAre(0));
  EXPECT_THAT(report.summary, HasSubstr("receive #2 from rank 0 to rank 1 of group 'pp'"));
}

TEST(FlightReport, FindsThatAllRanksArePresent) {
  Records records;
  for (const int rank : {0, 1, 2}) records.call(rank, "fsdp", {0, 1, 2}, 5, FlightState::Waiting);
  const FlightReport report = records.report();
  EXPECT_EQ(report.verdict, FlightVerdict::AllThere);
  EXPECT_THAT(report.summary, HasSubstr("all ranks have reached all_gather #5"));
}

// A rank isn't blocked in a prefetch that nothing waits for yet.
TEST(FlightReport, IgnoresAPrefetchWithoutAWait) {
  Records records;
  records.call(0, "fsdp", {0, 1, 2}, 5, FlightState::Launched);
  records.call(1, "fsdp", {0, 1, 2}, 4, FlightState::Finished);
  const FlightReport report = records.report();
  EXPECT_EQ(report.verdict, FlightVerdict::NoWait);
  EXPECT_THAT(report.summary, HasSubstr("no rank waits"));
}

TEST(FlightReport, SeparatesGroupsWithEqualNames) {
  Records records;
  records.call(0, "tp", {0, 1}, 3, FlightState::Waiting);
  records.call(1, "tp", {0, 1}, 3, FlightState::Waiting);
  records.call(2, "tp", {2, 3}, 9, FlightState::Waiting);
  const FlightReport report = records.report();
  EXPECT_THAT(report.culprits, ElementsAre(3));
}

// A background save may wait for minutes without a hang.
TEST(FlightReport, IgnoresBackgroundWorkWhileTheTrainingWaits) {
  Records records;
  for (const int rank : {0, 1})
    records.call(rank, "checkpoint", {0, 1, 2}, 3, FlightState::Waiting).background = true;
  EXPECT_THAT(records.report().culprits, ElementsAre(2)) << "nothing else waits";
  for (const int rank : {0, 2}) records.call(rank, "fsdp", {0, 1, 2}, 5, FlightState::Waiting);
  const FlightReport report = records.report();
  EXPECT_THAT(report.culprits, ElementsAre(1));
  EXPECT_THAT(report.summary, HasSubstr("rank 1 (host node1) is missing from all_gather #5 of group 'fsdp'"));
}

TEST(FlightReport, IgnoresAFailureThatTheRankSurvived) {
  Records records;
  FlightCall& failed = records.call(0, "probe", {0, 1}, 0, FlightState::Failed);
  failed.end_ns = failed.start_ns + 1;
  records.rank(1);
  EXPECT_THAT(records.report().culprits, ElementsAre(1)) << "the failure ended the rank";
  records.call(0, "fsdp", {0, 1}, 0, FlightState::Finished);
  EXPECT_EQ(records.report().verdict, FlightVerdict::NoWait);
}

// Records of other hosts may be on other file systems.
TEST(FlightReport, DoesNotBlameALiveRankWithoutARecord) {
  Records records;
  for (const int rank : {0, 1}) records.call(rank, "fsdp", {0, 1, 2}, 5, FlightState::Waiting);
  EXPECT_THAT(records.report().culprits, ElementsAre(2));
  const FlightReport report = records.report({.all_ranks_live = true});
  EXPECT_EQ(report.verdict, FlightVerdict::Unknown);
  EXPECT_TRUE(report.culprits.empty());
  EXPECT_THAT(report.summary, AllOf(HasSubstr("ranks 0, 1 wait in all_gather #5 of group 'fsdp'"),
                                    HasSubstr("it is unknown whether rank 2 reached it: rank 2 is alive")));
}

TEST(FlightReport, ReportsAFolderThatCannotBeRead) {
  EXPECT_THAT(flight_summary("/no/such/folder"), HasSubstr("/no/such/folder"));
}

}  // namespace
}  // namespace titan::dist
