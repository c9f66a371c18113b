#include "titan/dist/flight_record.h"

#include <gtest/gtest.h>

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

TEST(FlightRecorder, InternedNamesStay) {
  FlightRecorder recorder(2);
  const char* first = recorder.intern("dp_shard");
  for (int i = 0; i < 100; ++i) recorder.intern(std::to_string(i));
  EXPECT_EQ(first, recorder.intern("dp_shard"));
  EXPECT_STREQ(first, "dp_shard");
}

}  // namespace
}  // namespace titan::dist
