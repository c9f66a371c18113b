#include "plan/summary.h"

#include <gtest/gtest.h>

namespace titan::plan {
namespace {

int64_t activations(const BytesByCategory& bytes) {
  return bytes[static_cast<size_t>(Category::Activations)];
}

// Two steps of a module's forward and backward, after which another module needs more memory than both.
TEST(Summary, HasWhatIsSavedWhenTheBackwardOfTheLastStepBegins) {
  Trace trace;
  const int forward = trace.number_of("layer"), backward = trace.number_of("layer backward");
  for (int64_t step = 1; step <= 2; ++step) {
    trace.begin_step();
    trace.allocated(1, {.bytes = 1000 * step, .module = forward});
    trace.launched({.module = forward});
    trace.launched({.module = backward});
    trace.allocated(2, {.bytes = 50, .module = backward});
    trace.launched({.module = backward});
    trace.freed(1);
    trace.freed(2);
    trace.allocated(3, {.bytes = 5000, .module = trace.number_of("embedding backward")});
    trace.freed(3);
  }
  const Summary summary = summarize(trace);
  EXPECT_EQ(activations(summary.at_backward), 2000);
  EXPECT_EQ(activations(summary.peak.bytes), 5000);
}

// Each sample of memory over time is from where the sum is highest, which is never where the activations are.
TEST(Summary, HasTheMostOfEachCategory) {
  Trace trace;
  trace.begin_step();
  for (int i = 0; i < 1000; ++i) {
    trace.allocated(1, {.bytes = 100});
    trace.freed(1);
    trace.allocated(2, {.bytes = 200, .category = Category::Buffers});
    trace.freed(2);
  }
  const Summary summary = summarize(trace);
  EXPECT_EQ(activations(summary.most_bytes), 100);
  EXPECT_EQ(summary.most_bytes[static_cast<size_t>(Category::Buffers)], 200);
  EXPECT_EQ(activations(summary.peak.bytes), 0);
}

TEST(Summary, HasAPointWhereTheBackwardBegins) {
  Trace trace;
  const int layer = trace.number_of("layer"), backward = trace.number_of("layer backward");
  trace.begin_step();
  trace.allocated(1, {.bytes = 100, .module = layer});
  trace.launched({.module = backward});
  trace.freed(1);
  for (int i = 0; i < 2000; ++i) {  // each part's highest is one of these
    trace.allocated(2, {.bytes = 200, .category = Category::Buffers});
    trace.freed(2);
  }
  int64_t most = 0;
  const Summary summary = summarize(trace);
  for (const MemoryPoint& point : summary.over_time) most = std::max(most, activations(point.bytes));
  EXPECT_EQ(most, 100);
  EXPECT_EQ(activations(summary.over_time[summary.backward_point].bytes), 100);
}

// At each point of the list over time, modules' bytes add up to the categories'.
TEST(Summary, HasTheMemoryOfEachModuleOverTime) {
  Trace trace;
  const int norm = trace.number_of("norm"), wq = trace.number_of("wq");
  trace.allocated(1, {.bytes = 100, .module = wq, .category = Category::Parameters});
  trace.begin_step();
  trace.allocated(2, {.bytes = 10, .module = norm});
  trace.allocated(3, {.bytes = 20, .module = wq});
  trace.freed(2);
  const Summary summary = summarize(trace);
  ASSERT_EQ(summary.over_time.size(), 5U);  // one for each entry
  const auto changes_of = [&](const std::string& module, Category category) {
    std::vector<std::pair<size_t, int64_t>> changes;
    for (const ModuleMemory& memory : summary.by_module)
      if (memory.module == module && memory.category == category)
        for (const auto& [point, bytes] : memory.changes) changes.emplace_back(point, bytes);
    return changes;
  };
  using Changes = std::vector<std::pair<size_t, int64_t>>;
  EXPECT_EQ(changes_of("wq", Category::Parameters), (Changes{{0, 100}}));
  EXPECT_EQ(changes_of("norm", Category::Activations), (Changes{{2, 10}, {4, 0}}));
  EXPECT_EQ(changes_of("wq", Category::Activations), (Changes{{3, 20}}));
  EXPECT_EQ(summary.by_module.size(), 3U);
}

TEST(Summary, HasEachCollectiveOfTheLastStep) {
  Trace trace;
  const auto gather = [&](const char* label, int64_t bytes) {
    trace.called({{.op = trace.number_of("all_gather"), .label = trace.number_of(label), .bytes = bytes}});
  };
  trace.begin_step();
  gather("fsdp::all_gather layers.7", 1);
  trace.begin_step();
  gather("fsdp::all_gather layers.1", 64);
  gather("fsdp::all_gather layers.0", 32);
  gather("fsdp::all_gather layers.1", 64);
  const Summary summary = summarize(trace);
  ASSERT_EQ(summary.collectives.size(), 1U);
  const std::vector<CollectiveTotals::Call>& each = summary.collectives[0].each;
  ASSERT_EQ(each.size(), 2U);
  EXPECT_EQ(each[0].module, "layers.1");
  EXPECT_EQ(each[0].bytes, 64);
  EXPECT_EQ(each[0].calls, 2);
  EXPECT_EQ(each[1].module, "layers.0");
  EXPECT_EQ(summary.collectives[0].bytes, 160);
}

}  // namespace
}  // namespace titan::plan
