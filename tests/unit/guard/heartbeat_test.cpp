// Signs of life come whatever the folder of the records does.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>
#include <fstream>
#include <thread>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "dist/flight_record.h"
#include "guard/flight_report.h"
#include "guard/heartbeat.h"

namespace titan::dist {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;

class HeartbeatFolder : public ::testing::Test {
 protected:
  void SetUp() override {
    fs::remove_all(folder_);
    dump_ = std::make_shared<FlightDump>(world_.shared_recorder(), FlightDump::Options{.folder = folder_});
  }
  void TearDown() override { fs::remove_all(folder_); }

  static bool comes(const std::function<bool()>& condition) {
    const auto end = std::chrono::steady_clock::now() + 60s;
    while (!condition()) {
      if (std::chrono::steady_clock::now() > end) return false;
      std::this_thread::sleep_for(5ms);
    }
    return true;
  }
  std::string sign() const {
    const auto bytes = world_.store().get("heartbeat/rank_0");
    return {bytes.begin(), bytes.end()};
  }
  bool beats_go_on() const {
    const std::string before = sign();
    return comes([&] { return sign() != before; });
  }
  void request() const { std::ofstream(folder_ / kFlightRequest) << ""; }

  World world_ = init({.backend = "gloo", .device = "cpu"});
  fs::path folder_ =
      fs::path(::testing::TempDir()) /
      (std::string("heartbeat_") + ::testing::UnitTest::GetInstance()->current_test_info()->name());
  std::shared_ptr<FlightDump> dump_;
};

TEST_F(HeartbeatFolder, ARecordOnRequest) {
  const Heartbeat heartbeat(world_, dump_);
  request();
  EXPECT_TRUE(comes([&] { return fs::exists(dump_->path()); }));
  EXPECT_FALSE(fs::exists(folder_ / kFlightRequest));
  EXPECT_EQ(read_flight_file(dump_->path()).reason, "request");
}

// What can't be removed there is an error of every look, until it is gone.
TEST_F(HeartbeatFolder, AnErrorThereIsGotOver) {
  fs::create_directories(folder_ / kFlightRequest / "something");
  const Heartbeat heartbeat(world_, dump_);
  ASSERT_TRUE(comes([&] { return world_.store().check({"heartbeat/rank_0"}); }));
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(beats_go_on());
  fs::remove_all(folder_ / kFlightRequest);
  request();
  EXPECT_TRUE(comes([&] { return fs::exists(dump_->path()); }));
}

// A pipe that nobody reads is a file system that doesn't answer.
TEST_F(HeartbeatFolder, OneThatHangsHoldsNoBeatUp) {
  const fs::path pipe = folder_ / ".rank_0.json.tmp";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  {
    const Heartbeat heartbeat(world_, dump_);
    request();
    ASSERT_TRUE(comes([&] { return !fs::exists(folder_ / kFlightRequest); }));
    std::this_thread::sleep_for(100ms);
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(beats_go_on());
  }
  // The thread is let go.
  const int reader = open(pipe.c_str(), O_RDONLY | O_CLOEXEC);
  ASSERT_GE(reader, 0);
  char bytes[4096];
  while (read(reader, bytes, sizeof bytes) > 0) {
  }
  close(reader);
}

}  // namespace
}  // namespace titan::dist
