#include <gtest/gtest.h>
#include <atomic>
#include <future>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/threads.h"
#include "dist/flight_record.h"

namespace titan::dist {
namespace {

TEST(FlightRecorder, KeepsTheLastCalls) {
  FlightRecorder recorder(4);
  for (int i = 0; i < 6; ++i) {
    CallRecord call;
    call.bytes = i;
    EXPECT_EQ(recorder.start(call), static_cast<uint64_t>(i));
  }
  recorder.finish(5, CallState::Failed);
  recorder.finish(0, CallState::Finished);  // out of the ring by now
  const auto calls = recorder.snapshot();
  ASSERT_EQ(calls.size(), 4U);
  EXPECT_EQ(calls.front().bytes, 2);
  EXPECT_EQ(calls.back().bytes, 5);
  EXPECT_EQ(calls.back().state, CallState::Failed);
  EXPECT_EQ(calls.front().state, CallState::Launched);
  EXPECT_EQ(recorder.num_calls(), 6U);
}

TEST(FlightRecorder, RecordsEachGroupOnceAndKeepsIt) {
  FlightRecorder recorder(2);
  const GroupRecord* first = recorder.add_group("dp_shard", "", {0, 1});
  for (int i = 0; i < 100; ++i) recorder.add_group("dp_shard", std::to_string(i), {0, 1});
  EXPECT_EQ(first, recorder.add_group("dp_shard", "", {0, 1}));
  EXPECT_NE(first, recorder.add_group("dp_shard", "", {0, 2}));
  EXPECT_EQ(first->name, "dp_shard");
  int count = 0;
  for (const GroupRecord* group = recorder.last_group(); group; group = group->previous) ++count;
  EXPECT_EQ(count, 102);
}

TEST(FlightRecorder, RecordsNothingWithoutEntries) {
  FlightRecorder recorder(0);
  recorder.finish(recorder.start({}), CallState::Finished);
  EXPECT_EQ(recorder.num_calls(), 1U);
  EXPECT_TRUE(recorder.snapshot().empty());
}

TEST(FlightRecorder, StatesOfACall) {
  FlightRecorder recorder(4);
  const auto state = [&] { return recorder.snapshot().back().state; };
  const uint64_t host = recorder.start({});
  EXPECT_EQ(state(), CallState::Launched);
  recorder.wait(host);
  EXPECT_EQ(state(), CallState::Waiting);
  recorder.finish(host, CallState::Finished);
  EXPECT_EQ(state(), CallState::Finished);
  EXPECT_GT(recorder.snapshot().back().end_ns, 0);
}

// The recorder asks the device and never waits for it.
TEST(FlightRecorder, SweepFinishesCompletedDeviceCalls) {
  FlightRecorder recorder(4);
  bool done = false;
  const uint64_t call = recorder.start({});
  recorder.wait(call);
  recorder.finish_when(call, [&] { return DeviceCall{done}; });
  recorder.sweep();
  EXPECT_EQ(recorder.snapshot().back().state, CallState::Ordered);
  EXPECT_EQ(recorder.snapshot().back().end_ns, 0);
  done = true;
  recorder.sweep();
  EXPECT_EQ(recorder.snapshot().back().state, CallState::Finished);
}

TEST(FlightRecorder, LongTextsLoseTheirBeginning) {
  CallRecord call;
  call.set_label("phase", "a_very_long_name_of_a_module_in_a_deep_tree.layers.31.attention.wq");
  EXPECT_STREQ(call.phase, "phase");
  EXPECT_EQ(std::string(call.module).size(), sizeof(call.module) - 1);
  EXPECT_TRUE(std::string(call.module).ends_with("layers.31.attention.wq"));
}

TEST(FlightRecorder, SizesOfManyDims) {
  CallSizes sizes;
  sizes.set({2, 3, 4, 5, 6, 7});
  EXPECT_EQ(sizes.num_dims, 4);
  EXPECT_EQ(sizes.dims, (std::array<int64_t, 4>{2 * 3 * 4, 5, 6, 7}));
}

// The watchdog needs the open call even if no calls are kept for the files.
TEST(FlightRecorder, KnowsTheOpenCallWithoutEntries) {
  FlightRecorder recorder(0);
  EXPECT_FALSE(recorder.open_call(true));
  CallRecord call;
  call.bytes = 17;
  const uint64_t waited_for = recorder.start(call);
  recorder.wait(waited_for);
  for (int i = 0; i < 100; ++i) recorder.start({});  // prefetched
  ASSERT_TRUE(recorder.open_call(true));
  EXPECT_EQ(recorder.open_call(true)->bytes, 17);
  recorder.finish(waited_for, CallState::Finished);
  EXPECT_FALSE(recorder.open_call(true));
  EXPECT_TRUE(recorder.snapshot().empty());
}

TEST(FlightRecorder, MarksBackgroundCalls) {
  FlightRecorder recorder(16);
  std::thread([&] {
    const BackgroundCalls background;
    recorder.wait(recorder.start({}));
  }).join();
  EXPECT_FALSE(recorder.open_call(/*with_background=*/false)) << "the training doesn't wait for it";
  ASSERT_TRUE(recorder.open_call(/*with_background=*/true));
  EXPECT_TRUE(recorder.open_call(true)->background);
  recorder.wait(recorder.start({}));
  ASSERT_TRUE(recorder.open_call(false));
  EXPECT_EQ(recorder.open_call(false)->number, 1U);
}

TEST(FlightRecorder, CallsOfAFailedDeviceFail) {
  FlightRecorder recorder(4);
  recorder.finish_when(recorder.start({}),
                       []() -> DeviceCall { throw std::runtime_error("illegal access"); });
  bool done = false;
  recorder.finish_when(recorder.start({}), [&] { return DeviceCall{done}; });
  recorder.sweep();
  EXPECT_EQ(recorder.snapshot()[0].state, CallState::Failed);
  EXPECT_EQ(recorder.snapshot()[1].state, CallState::Ordered) << "the device is asked again";
  done = true;
  recorder.sweep();
  EXPECT_EQ(recorder.snapshot()[1].state, CallState::Finished);
}

TEST(FlightRecorder, SweepsManyDeviceCallsWithoutAThread) {
  FlightRecorder recorder(8000);
  for (int i = 0; i < 6000; ++i) recorder.finish_when(recorder.start({}), [] { return DeviceCall{true}; });
  recorder.sweep();
  for (const CallRecord& call : recorder.snapshot())
    ASSERT_EQ(call.state, CallState::Finished) << call.number;
  EXPECT_FALSE(recorder.open_call(true));
}

TEST(FlightRecorder, LateEndsDoNotMarkNewerCalls) {
  FlightRecorder recorder(4, /*least_slots=*/4);
  for (int i = 0; i < 9; ++i) recorder.start({});
  recorder.finish(8, CallState::Finished);
  recorder.finish(4, CallState::Failed);  // its slot has call 8 now
  const CallRecord call = recorder.snapshot().back();
  EXPECT_EQ(call.state, CallState::Finished);
  EXPECT_GE(call.end_ns, call.start_ns);
  EXPECT_LT(call.end_ns - call.start_ns, int64_t{600} * 1'000'000'000);
}

// A reader gets a whole call or none, even while it is overwritten.
TEST(FlightRecorder, ReadersSeeWholeCalls) {
  FlightRecorder recorder(8, /*least_slots=*/8);
  std::atomic<bool> ends{false};
  std::vector<std::thread> writers;
  for (int t = 0; t < 3; ++t) {
    writers.emplace_back([&] {
      while (!ends) {
        CallRecord call;
        call.bytes = static_cast<int64_t>(recorder.num_calls());
        call.peer = static_cast<int>(call.bytes % 1000);
        call.set_label("phase", std::to_string(call.bytes));
        recorder.finish(recorder.start(call), CallState::Finished);
      }
    });
  }
  int64_t seen = 0;
  while (seen < 2000) {
    for (const CallRecord& call : recorder.snapshot()) {
      ++seen;
      ASSERT_EQ(std::to_string(call.bytes), call.module);
      ASSERT_EQ(call.peer, call.bytes % 1000);
    }
  }
  ends = true;
  for (auto& writer : writers) writer.join();
}

using namespace std::chrono_literals;

bool ends_within(const FlightRecorder& recorder, std::chrono::seconds limit) {
  const auto end = std::chrono::steady_clock::now() + limit;
  while (recorder.snapshot().back().state != CallState::Finished) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(1ms);
  }
  return true;
}

TEST(SideThread, SweepsCallsThatDevicesHaveFinished) {
  auto recorder = std::make_shared<FlightRecorder>(4);
  const SideThread sweep(
      "sweep", [recorder] { recorder->sweep(); }, 1ms);
  std::atomic<bool> done{false};
  recorder->finish_when(recorder->start({}), [&] { return DeviceCall{done.load()}; });
  EXPECT_EQ(recorder->snapshot().back().state, CallState::Ordered);
  done = true;
  EXPECT_TRUE(ends_within(*recorder, 60s));
}

// Neither a recording thread nor the end of the program waits for it forever.
TEST(SideThread, AHangingDriverBlocksNobodyElse) {
  auto recorder = std::make_shared<FlightRecorder>(4);
  auto asked = std::make_shared<std::promise<void>>(), answer = std::make_shared<std::promise<void>>();
  {
    const SideThread sweep(
        "sweep", [recorder] { recorder->sweep(); }, 1ms);
    recorder->finish_when(recorder->start({}), [asked, answer] {
      asked->set_value();
      answer->get_future().wait();
      return DeviceCall{true};
    });
    asked->get_future().wait();
    recorder->finish_when(recorder->start({}), [] { return DeviceCall{true}; });
    EXPECT_TRUE(recorder->open_call(true));
  }
  answer->set_value();
  recorder->sweep();
  EXPECT_EQ(recorder->snapshot().back().state, CallState::Finished);
}

}  // namespace
}  // namespace titan::dist
