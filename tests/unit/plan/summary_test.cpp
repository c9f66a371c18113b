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

}  // namespace
}  // namespace titan::plan
