// The files that a rank leaves when the job hangs, and the end of its process.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/stat.h>
#include <unistd.h>
#include <csignal>
#include <fstream>
#include <future>
#include <sstream>
#include <thread>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "core/threads.h"
#include "dist/flight_record.h"
#include "guard/flight_dump.h"
#include "guard/hang_report.h"

namespace titan::dist {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;

std::string text_in_file(const fs::path& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

class HangFiles : public ::testing::Test {
 protected:
  void SetUp() override {
    fs::remove_all(folder_);
    dump_ = std::make_shared<FlightDump>(std::make_shared<FlightRecorder>(4),
                                         FlightDump::Options{.folder = folder_});
  }
  void TearDown() override { fs::remove_all(folder_); }

  fs::path folder_ = fs::path(::testing::TempDir()) /
                     (std::string("hang_") + ::testing::UnitTest::GetInstance()->current_test_info()->name());
  std::shared_ptr<FlightDump> dump_;
};

TEST_F(HangFiles, HaveTheStacksTheirTimeAndTheRecord) {
  SideThread thread("files");
  leave_files({0, "where it is", folder_, dump_, "a hang"}, thread, 60s);
  EXPECT_TRUE(fs::exists(dump_->path()));
  EXPECT_THAT(text_in_file(stacks_path(folder_, 0)),
              ::testing::MatchesRegex("20[0-9-]+T[0-9:]+Z\nwhere it is"));
}

// The file system of the files may be what hangs the job.
TEST_F(HangFiles, AreGivenUpWhenTheirFileSystemHangs) {
  const fs::path pipe = folder_ / ".rank_0.json.tmp";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  SideThread thread("files");
  leave_files({0, "where it is", folder_, dump_, "a hang"}, thread, 200ms);
  EXPECT_FALSE(fs::exists(dump_->path()));
  std::signal(SIGPIPE, SIG_IGN);  // for a thread that writes after the end of this test
  const int reader = open(pipe.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);  // lets the thread continue
  ASSERT_GE(reader, 0);
  std::this_thread::sleep_for(100ms);
  close(reader);
}

TEST(HungProcess, EndsWithItsExitCodeWhileItWaits) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  const auto wait = [] {
    end_process_after(1s);
    while (true) pause();
  };
  EXPECT_EXIT(wait(), ::testing::ExitedWithCode(kHungExitCode), "");
}

// The rank with the store has already ended when its peers notice.
TEST(ExplainAlone, NamesTheRankThatReportedAnErrorOfItsOwn) {
  FailureScene scene;
  scene.rank = 1;
  scene.failure = "connection closed";
  scene.is_about_peer = true;
  EXPECT_EQ(explain_alone(scene, "the store is gone").text,
            "the store is gone; this is rank 1: connection closed");
  EXPECT_TRUE(explain_alone(scene, "the store is gone").is_about_peer);
  scene.record_request = "failure of rank 0: connection closed";
  EXPECT_EQ(explain_alone(scene, "the store is gone").told_by, -1);
  scene.record_request = "failure of rank 0 itself: no space";
  const Explanation why = explain_alone(scene, "the store is gone");
  EXPECT_EQ(why.text, "rank 0 failed: no space");
  EXPECT_EQ(why.told_by, 0);
  EXPECT_TRUE(why.covers_own_error);
  EXPECT_TRUE(why.is_about_peer);
  scene.record_request = "failure of the job: lost: rank 2";
  EXPECT_EQ(explain_alone(scene, "the store is gone").text, "lost: rank 2");
  scene.is_about_peer = false;
  EXPECT_EQ(explain_alone(scene, "the store is gone").text,
            "rank 1 failed: connection closed; the store is gone");
  EXPECT_FALSE(explain_alone(scene, "the store is gone").is_about_peer);
}

TEST(ErrorOfCall, IsRecognizedWithinALongerText) {
  FlightRecorder recorder(4);
  CallRecord call;
  call.group = recorder.add_group("dp", "", {0, 1});
  recorder.start(call);
  recorder.finish(recorder.start(call), CallState::Finished);
  EXPECT_FALSE(is_error_of_call(call.failure(), recorder));
  recorder.finish(recorder.start(call), CallState::Failed);
  EXPECT_TRUE(is_error_of_call("step 3: " + call.failure() + " on its rank 0 of 2", recorder));
  EXPECT_FALSE(is_error_of_call("no space", recorder)) << "the failed call had no consequences";
}

// Rank 1's error names rank 0, which fails for a reason of its own.
TEST(ExplainFailure, KeepsAnErrorThatNamesARankWithAnotherError) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto scene_of = [store](int rank, const std::string& failure) {
    FailureScene scene;
    scene.rank = rank;
    scene.size = 2;
    scene.failure = failure;
    scene.connect = [store] { return store; };
    return scene;
  };
  auto first = std::async(std::launch::async,
                          [&] { return explain_failure(scene_of(1, "the file of rank 0 is damaged")); });
  for (int look = 0; look < 1000 && store->add("failures", 0) == 0; ++look) std::this_thread::sleep_for(10ms);
  const Explanation why = explain_failure(scene_of(0, "no space"));
  EXPECT_EQ(why.text, "rank 1 failed: the file of rank 0 is damaged");
  EXPECT_EQ(why.told_by, 1);
  EXPECT_EQ(first.get().text, why.text);
  // For a rank that fails only when the store is gone.
  FailureScene last;
  last.rank = 2;
  last.is_about_peer = true;
  last.record_request = store->get_to_str("record_reason");
  EXPECT_EQ(explain_alone(last, "the store is gone").text, why.text);
}

// Another rank has reported a failure first, and doesn't say what it found.
TEST(ExplainFailure, LeavesTheCulpritTimeToEndFirst) {
  FailureScene scene;
  scene.rank = 1;
  scene.size = 2;
  scene.failure = "connection closed";
  const auto store = c10::make_intrusive<c10d::HashStore>();
  scene.connect = [store] { return store; };
  store->add("failures", 1);
  const auto start = std::chrono::steady_clock::now();
  EXPECT_THAT(explain_failure(scene).text, ::testing::HasSubstr("didn't find the cause within 4.5 s"));
  EXPECT_LT(std::chrono::steady_clock::now() - start, kExplainsWithin - kRecordWithin - kCulpritsFirst);
}

TEST(OpenCall, IncludesTheCheckpointersOnlyDuringSavesAndLoads) {
  FlightRecorder recorder(4);
  {
    const BackgroundCalls background;
    CallRecord call;
    call.op = CollectiveOp::Receive;
    recorder.wait(recorder.start(call));
  }
  EXPECT_EQ(open_call(recorder, ProgressKind::Data), "");
  EXPECT_EQ(open_call(recorder, ProgressKind::Compute), "");
  EXPECT_THAT(open_call(recorder, ProgressKind::Checkpoint), ::testing::HasSubstr("receive #0"));
}

}  // namespace
}  // namespace titan::dist
