// Flight records: written and read back, PyTorch's, and damaged ones.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <cerrno>
#include <cstdlib>
#include <fstream>

#include "dist/flight_record.h"
#include "guard/flight_dump.h"
#include "guard/flight_report.h"
#include "titan/core/error.h"

namespace titan::dist {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class FlightFiles : public ::testing::Test {
 protected:
  void SetUp() override { std::filesystem::remove_all(folder_); }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  FlightDump::Options options(int rank, bool on_signals = false) const {
    return {.folder = folder_, .rank = rank, .world_size = 2, .on_signals = on_signals};
  }

  std::filesystem::path folder_ =
      std::filesystem::path(::testing::TempDir()) /
      ("flights_" + std::string(::testing::UnitTest::GetInstance()->current_test_info()->name()));
};

CallRecord call_of(const GroupRecord* group, CollectiveOp op, int peer = -1) {
  CallRecord call;
  call.op = op;
  call.group = group;
  call.peer = peer;
  call.sequence = 7;
  call.bytes = 48;
  call.dtype = c10::ScalarType::BFloat16;
  call.in.set({4, 2});
  call.out.set({12, 2});
  call.set_label("fsdp::\"unshard\"\n", "layers.3");
  return call;
}

TEST_F(FlightFiles, ReadBackWhatIsWritten) {
  auto recorder = std::make_shared<FlightRecorder>(16);
  const GroupRecord* dp = recorder->add_group("dp_shard", "checkpoint", {0, 1});
  const GroupRecord* pp = recorder->add_group("pp", "", {1, 5});
  recorder->set_activity("data", 12);
  recorder->finish(recorder->start(call_of(dp, CollectiveOp::AllGather)), CallState::Finished,
                   /*device_ns=*/1234);
  CallRecord receives = call_of(pp, CollectiveOp::Receive, 1);
  receives.num_tensors = 2;
  recorder->wait(recorder->start(receives));
  FlightDump dump(recorder, options(1));
  ASSERT_EQ(dump.write("a \"test\""), 0);

  const auto files = read_flight_folder(folder_);
  ASSERT_EQ(files.size(), 1U);
  const FlightFile& file = files[0];
  EXPECT_EQ(file.rank, 1);
  EXPECT_EQ(file.world_size, 2);
  EXPECT_EQ(file.reason, "a \"test\"");
  EXPECT_EQ(file.activity, "data");
  EXPECT_EQ(file.step, 12);
  EXPECT_TRUE(file.is_titan && file.is_whole);
  ASSERT_EQ(file.calls.size(), 2U);
  const FlightCall& gather = file.calls[0];
  EXPECT_EQ(file.groups[gather.group].name, "dp_shard");
  EXPECT_EQ(file.groups[gather.group].purpose, "checkpoint");
  EXPECT_THAT(file.groups[gather.group].ranks, ElementsAre(0, 1));
  EXPECT_EQ(gather.op, "all_gather");
  EXPECT_EQ(gather.sequence, 7);
  EXPECT_EQ(gather.phase, "fsdp::\"unshard\"\n");
  EXPECT_EQ(gather.module, "layers.3");
  EXPECT_THAT(gather.in_sizes, ElementsAre(ElementsAre(4, 2)));
  EXPECT_THAT(gather.out_sizes, ElementsAre(ElementsAre(12, 2)));
  EXPECT_THAT(gather.dtypes, ElementsAre("BFloat16"));
  EXPECT_EQ(gather.state, FlightState::Finished);
  EXPECT_GE(gather.end_ns, gather.start_ns);
  EXPECT_EQ(gather.device_ns, 1234);
  EXPECT_NEAR(static_cast<double>(file.time_ns - gather.start_ns), 0, 60e9);
  const FlightCall& receive = file.calls[1];
  EXPECT_EQ(receive.op, "receive");
  EXPECT_EQ(receive.from, 1);
  EXPECT_EQ(receive.to, 0);
  EXPECT_THAT(receive.in_sizes, ElementsAre(ElementsAre(4, 2), ElementsAre(4, 2)));
  EXPECT_EQ(receive.state, FlightState::Waiting);
}

TEST_F(FlightFiles, HaveOnlyTheRingsLastCalls) {
  auto recorder = std::make_shared<FlightRecorder>(4);
  const GroupRecord* group = recorder->add_group("dp", "", {0, 1});
  for (int i = 0; i < 10; ++i) recorder->start(call_of(group, CollectiveOp::AllReduce));
  FlightDump dump(recorder, options(0));
  ASSERT_EQ(dump.write("test"), 0);
  const FlightFile file = read_flight_file(dump.path());
  EXPECT_EQ(file.calls.size(), 4U);
  EXPECT_EQ(file.calls.front().record, 6);
  EXPECT_FALSE(file.is_whole);
}

TEST_F(FlightFiles, HaveLastAndUnfinishedCallsAfterAFailure) {
  auto recorder = std::make_shared<FlightRecorder>(5000);
  const GroupRecord* group = recorder->add_group("dp", "", {0, 1});
  for (uint64_t i = 0; i < 4000; ++i) {
    const uint64_t number = recorder->start(call_of(group, CollectiveOp::AllReduce));
    i == 10 ? recorder->wait(number) : recorder->finish(number, CallState::Finished);
  }
  FlightDump dump(recorder, options(0));
  ASSERT_EQ(dump.write("test", FlightExtent::Last), 0);
  const FlightFile file = read_flight_file(dump.path());
  ASSERT_EQ(file.calls.size(), kLastCalls + 1);
  EXPECT_EQ(file.calls.front().record, 10);
  EXPECT_EQ(file.calls[1].record, static_cast<int64_t>(4000 - kLastCalls));
  ASSERT_EQ(dump.write("test"), 0);
  EXPECT_EQ(read_flight_file(dump.path()).calls.size(), 4000U);
}

TEST_F(FlightFiles, MarkCallsInTheBackground) {
  auto recorder = std::make_shared<FlightRecorder>(4);
  const GroupRecord* group = recorder->add_group("checkpoint", "", {0, 1});
  recorder->start(call_of(group, CollectiveOp::AllReduce));
  {
    const BackgroundCalls background;
    recorder->start(call_of(group, CollectiveOp::AllReduce));
  }
  FlightDump dump(recorder, options(0));
  ASSERT_EQ(dump.write("test"), 0);
  const FlightFile file = read_flight_file(dump.path());
  EXPECT_FALSE(file.calls[0].background);
  EXPECT_TRUE(file.calls[1].background);
}

// Ranks that are about to end have little time to read.
TEST_F(FlightFiles, AreReadUntilATimeLimit) {
  FlightDump dump(std::make_shared<FlightRecorder>(4), options(0));
  ASSERT_EQ(dump.write("test"), 0);
  const auto now = std::chrono::steady_clock::now();
  EXPECT_EQ(read_flight_folder(folder_, now + std::chrono::hours(1)).size(), 1U);
  EXPECT_THROW(read_flight_folder(folder_, now), Error);
  EXPECT_THAT(flight_summary(folder_, {.end = now}), HasSubstr("take longer to read than there is time"));
}

TEST_F(FlightFiles, ReplaceTheFileOfAnEarlierRun) {
  std::filesystem::create_directories(folder_);
  std::ofstream(folder_ / "rank_0.json") << "old";
  FlightDump dump(std::make_shared<FlightRecorder>(4), options(0));
  EXPECT_FALSE(std::filesystem::exists(dump.path()));
}

TEST_F(FlightFiles, ReportAMissingFolder) {
  FlightDump dump(std::make_shared<FlightRecorder>(4), options(0));
  std::filesystem::remove_all(folder_);
  EXPECT_EQ(dump.write("test"), ENOENT);
}

TEST_F(FlightFiles, AreWrittenAtSigquitWhileTheProcessContinues) {
  auto recorder = std::make_shared<FlightRecorder>(4);
  FlightDump dump(recorder, options(0, /*on_signals=*/true));
  ASSERT_EQ(raise(SIGQUIT), 0);
  EXPECT_EQ(read_flight_file(dump.path()).reason, "SIGQUIT");
}

// Users also send SIGQUIT to ranks that haven't begun or are about to end.
TEST_F(FlightFiles, SurviveSigquitBeforeAndAfterRecording) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  const auto ask = [&] {
    survive_sigquit();
    raise(SIGQUIT);
    { FlightDump dump(std::make_shared<FlightRecorder>(4), options(0, /*on_signals=*/true)); }
    raise(SIGQUIT);
    std::_Exit(std::filesystem::exists(folder_ / "rank_0.json") ? 1 : 0);
  };
  EXPECT_EXIT(ask(), ::testing::ExitedWithCode(0), "");
}

/// A record as PyTorch 2.11 writes it: torch/csrc/distributed/c10d/FlightRecorderDetail.hpp, dump_json.
std::string torch_file(int missing_from) {
  std::string entries;
  for (int seq = 1; seq < missing_from; ++seq) {
    entries +=
        str(entries.empty() ? "" : ",", R"({"record_id": )", seq - 1, R"(, "pg_id": 0,
      "process_group": ["0", "default_pg"], "thread_name": "main", "thread_id": "1", "collective_seq_id": )",
            seq, R"(, "p2p_seq_id": 0, "op_id": )", seq, R"(, "profiling_name": "nccl:_all_gather_base",
      "time_created_ns": 1700000000000000000, "duration_ms": 0.5, "input_sizes": [[4]],
      "input_dtypes": ["Float"], "output_sizes": [[8]], "output_dtypes": ["Float"], "state": ")",
            seq == 3 ? "scheduled" : "completed", R"(", "time_discovered_started_ns": 0,
      "time_discovered_completed_ns": 0, "retired": false, "timeout_ms": 600000, "is_p2p": false})");
  }
  return str(R"({"version": "2.10", "comm_lib_version": "2.27", "pg_config": {"0": {"name": "0",
    "desc": "default_pg", "ranks": "[0, 1]"}}, "pg_status": {}, "entries": [)",
             entries, "]}");
}

TEST_F(FlightFiles, ReadPyTorchsRecords) {
  std::filesystem::create_directories(folder_);
  std::ofstream(folder_ / "nccl_trace_rank_0") << torch_file(4);
  std::ofstream(folder_ / "nccl_trace_rank_1") << torch_file(3);
  const auto files = read_flight_folder(folder_);
  ASSERT_EQ(files.size(), 2U);
  EXPECT_FALSE(files[0].is_titan);
  const FlightReport report = make_flight_report(files);
  EXPECT_EQ(report.verdict, FlightVerdict::Missing);
  EXPECT_THAT(
      report.summary,
      HasSubstr("rank 1 is missing from _all_gather_base #3 of group 'default_pg', where rank 0 waits"));
}

// Files that two gloo ranks of PyTorch wrote. The second rank didn't reach the third call
// (scripts/make_flight_golden.py).
TEST(FlightGolden, ReadsFilesOfPyTorch) {
  const auto files =
      read_flight_folder(std::filesystem::path(TITAN_SOURCE_DIR) / "tests/data/golden/pytorch_flight");
  ASSERT_EQ(files.size(), 2U);
  ASSERT_EQ(files[0].calls.size(), 3U);
  EXPECT_EQ(files[0].calls[1].op, "all_gather");
  EXPECT_EQ(files[0].calls[1].dtypes, std::vector<std::string>{"BFloat16"});
  EXPECT_EQ(files[0].calls[1].out_sizes, (std::vector<std::vector<int64_t>>{{2, 5}}));
  EXPECT_TRUE(files[0].calls[1].has_ended());
  EXPECT_FALSE(files[0].calls[2].has_ended());
  EXPECT_EQ(files[0].groups[files[0].calls[0].group].ranks, (std::vector<int>{0, 1}));
  const FlightReport report = make_flight_report(files);
  EXPECT_EQ(report.verdict, FlightVerdict::Missing);
  EXPECT_THAT(report.summary,
              HasSubstr("rank 1 is missing from all_reduce #3 of group 'default_pg', where rank 0 waits"));
}

std::string error_of(const std::string& text, const std::string& name = "rank_0.json") {
  try {
    parse_flight_file(text, name);
  } catch (const Error& error) {
    return error.what();
  }
  return "none";
}

TEST(FlightFileErrors, NameThePlace) {
  EXPECT_THAT(error_of("{"), HasSubstr("rank_0.json: isn't JSON"));
  EXPECT_THAT(error_of("[]"), HasSubstr("isn't a flight record"));
  EXPECT_THAT(error_of("\x80\x02}"), HasSubstr("is a pickle"));
  EXPECT_THAT(error_of(R"({"version": "2.10"})", "record"), HasSubstr("the record has no rank"));
  EXPECT_THAT(error_of(R"({"version": "2.10", "entries": [{"record_id": "a"}]})"),
              HasSubstr("rank_0.json: entries[0].record_id isn't a whole number"));
  EXPECT_THAT(error_of(R"({"version": "2.10", "entries": [{"record_id": 1, "process_group": ["0", ""],
                          "profiling_name": "nccl:x", "state": "lost"}]})"),
              HasSubstr("entries[0].state is 'lost'; known are"));
  EXPECT_THAT(error_of(R"({"version": "2.10", "pg_config": {"0": {"ranks": [-1]}}})"),
              HasSubstr("pg_config.0.ranks is -1, not in 0.."));
  EXPECT_THAT(error_of(std::string(40, '[') + std::string(40, ']')), HasSubstr("nested deeper"));
}

TEST_F(FlightFiles, RefuseFoldersWithoutRecordsOrWithTwoOfARank) {
  std::filesystem::create_directories(folder_);
  EXPECT_THROW(read_flight_folder(folder_), Error);
  std::ofstream(folder_ / "a_0") << torch_file(2);
  std::ofstream(folder_ / "b_0") << torch_file(2);
  EXPECT_THROW(read_flight_folder(folder_), Error);
}

}  // namespace
}  // namespace titan::dist
