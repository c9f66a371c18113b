#include "dist/device_sweep.h"

#include <gtest/gtest.h>

#include <future>
#include <thread>

namespace titan::dist {
namespace {

using namespace std::chrono_literals;

bool ends_within(const FlightRecorder& recorder, std::chrono::seconds limit) {
  const auto end = std::chrono::steady_clock::now() + limit;
  while (recorder.snapshot().back().state != CallState::Finished) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(1ms);
  }
  return true;
}

TEST(DeviceSweep, FinishesWhatDevicesAreDoneWith) {
  auto recorder = std::make_shared<FlightRecorder>(4);
  const DeviceSweep sweep(recorder, 1ms);
  std::atomic<bool> done{false};
  recorder->finish_when(recorder->start({}), [&] { return done.load(); });
  EXPECT_EQ(recorder->snapshot().back().state, CallState::Ordered);
  done = true;
  EXPECT_TRUE(ends_within(*recorder, 60s));
}

// Nobody waits for it for ever: not who records, nor who ends.
TEST(DeviceSweep, ADriverThatHangsHoldsNobodyUp) {
  auto recorder = std::make_shared<FlightRecorder>(4);
  auto asked = std::make_shared<std::promise<void>>(), answer = std::make_shared<std::promise<void>>();
  {
    const DeviceSweep sweep(recorder, 1ms);
    recorder->finish_when(recorder->start({}), [asked, answer] {
      asked->set_value();
      answer->get_future().wait();
      return true;
    });
    asked->get_future().wait();
    recorder->finish_when(recorder->start({}), [] { return true; });
    EXPECT_TRUE(recorder->open_call(true));
  }
  answer->set_value();
  recorder->sweep();
  EXPECT_EQ(recorder->snapshot().back().state, CallState::Finished);
}

}  // namespace
}  // namespace titan::dist
