// Recording a call allocates nothing: its cost doesn't depend on the allocator, and it works when memory is
// exhausted or damaged.

#include <algorithm>
#include <cstdlib>
#include <new>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "dist/flight_record.h"

namespace {

// Counts this thread's allocations in the whole program.
thread_local int64_t num_allocations = 0;

}  // namespace

void* operator new(size_t bytes) {
  ++num_allocations;
  if (void* memory = std::malloc(std::max<size_t>(bytes, 1))) return memory;
  throw std::bad_alloc();
}
void* operator new(size_t bytes, const std::nothrow_t& /*tag*/) noexcept {
  ++num_allocations;
  return std::malloc(std::max<size_t>(bytes, 1));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, const std::nothrow_t& /*tag*/) noexcept { std::free(memory); }
void operator delete(void* memory, size_t /*bytes*/) noexcept { std::free(memory); }

namespace titan::dist {
namespace {

// As collectives do it: fill in, start, wait, finish.
void record_calls(FlightRecorder& recorder, const GroupRecord* group, const std::string& module, int count) {
  const std::vector<int64_t> in = {4096}, out = {2, 3, 4, 5, 6};
  const int64_t before = num_allocations;
  for (int i = 0; i < count; ++i) {
    CallRecord call;
    call.op = CollectiveOp::AllGather;
    call.group = group;
    call.set_label("fsdp::unshard", module);
    call.in.set(in);
    call.out.set(out);
    const uint64_t number = recorder.start(call);
    recorder.wait(number);
    recorder.add_wait(1000);
    recorder.finish(number, CallState::Finished);
    recorder.set_activity("forward_backward", i);
  }
  EXPECT_EQ(num_allocations, before) << count << " calls";
}

TEST(FlightRecorderMemory, RecordingAllocatesNothing) {
  FlightRecorder recorder(64, /*least_slots=*/64);
  const GroupRecord* group = recorder.add_group("dp_shard", "", {0, 1});
  const int64_t before = num_allocations;
  const std::string module = "model.layers.31.feed_forward.with_a_name_that_is_longer_than_its_place";
  ASSERT_GT(num_allocations, before) << "allocations are counted";
  record_calls(recorder, group, module, 1000);  // the ring's first turn among many
  EXPECT_EQ(recorder.snapshot().size(), 64U);
  EXPECT_TRUE(module.ends_with(recorder.snapshot().back().module));
}

// The watchdog asks this at each check.
TEST(FlightRecorderMemory, QueryingTheOpenCallAllocatesNothing) {
  FlightRecorder recorder(64, /*least_slots=*/64);
  recorder.wait(recorder.start({}));
  const int64_t before = num_allocations;
  const bool is_known = recorder.open_call(/*with_background=*/true).has_value();
  CallRecord call;
  const bool is_read = recorder.read(0, call);
  EXPECT_EQ(num_allocations, before);
  EXPECT_TRUE(is_known && is_read);
}

}  // namespace
}  // namespace titan::dist
