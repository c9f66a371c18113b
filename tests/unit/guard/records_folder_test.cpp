// The watchdog sends beats even if the folder of the flight records fails or hangs.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>
#include <fstream>
#include <thread>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "dist/flight_record.h"
#include "guard/flight_dump.h"
#include "guard/flight_report.h"
#include "guard/mail.h"
#include "titan/guard/watchdog.h"
namespace titan::dist {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;

class RecordsFolder : public ::testing::Test {
 protected:
  void SetUp() override { fs::remove_all(folder_); }
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
    const auto bytes = beats_->get("watchdog/1/beat/0");
    return {bytes.begin(), bytes.end()};
  }
  bool beats_continue() const {
    const std::string before = sign();
    return comes([&] { return sign() != before; });
  }
  void request() const { std::ofstream(folder_ / kFlightRequest) << ""; }

  World world_ = init({.backend = "gloo", .device = "cpu"});
  StorePtr beats_ = connect_again(world_.store());  // as the watchdog does
  fs::path folder_ =
      fs::path(::testing::TempDir()) /
      (std::string("records_") + ::testing::UnitTest::GetInstance()->current_test_info()->name());
  fs::path record_ = folder_ / "rank_0.json";
};

TEST_F(RecordsFolder, GetsARecordOnRequest) {
  const Watchdog watchdog(world_, {.folder = folder_, .record_prefix = "rank_"});
  request();
  EXPECT_TRUE(comes([&] { return fs::exists(record_); }));
  EXPECT_FALSE(fs::exists(folder_ / kFlightRequest));
  EXPECT_EQ(read_flight_file(record_).reason, "request");
}

// A request that can't be removed is an error at every check until it is gone.
TEST_F(RecordsFolder, RecoversFromAFolderError) {
  fs::create_directories(folder_ / kFlightRequest / "something");
  const Watchdog watchdog(world_, {.folder = folder_, .record_prefix = "rank_"});
  ASSERT_TRUE(comes([&] { return beats_->check({"watchdog/1/beat/0"}); }));
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(beats_continue());
  fs::remove_all(folder_ / kFlightRequest);
  request();
  EXPECT_TRUE(comes([&] { return fs::exists(record_); }));
}

// A pipe that nobody reads simulates a file system that doesn't answer.
TEST_F(RecordsFolder, DelaysNoBeatWhenItHangs) {
  const fs::path pipe = folder_ / ".rank_0.json.tmp";
  fs::create_directories(folder_);
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  {
    const Watchdog watchdog(world_, {.folder = folder_, .record_prefix = "rank_"});
    request();
    ASSERT_TRUE(comes([&] { return !fs::exists(folder_ / kFlightRequest); }));
    std::this_thread::sleep_for(100ms);
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(beats_continue());
  }
  // Lets the thread continue.
  const int reader = open(pipe.c_str(), O_RDONLY | O_CLOEXEC);
  ASSERT_GE(reader, 0);
  char bytes[4096];
  while (read(reader, bytes, sizeof bytes) > 0) {
  }
  close(reader);
}

}  // namespace
}  // namespace titan::dist
