#include <gtest/gtest.h>
#include <filesystem>
#include <fstream>
#include <string>

#include "observe/profiling.h"
#include "titan/core/error.h"
#include "unit/data/temporary_folder.h"

namespace titan::train {
namespace {

// Of the steps 1 to 12: '.', 'w', 'r' and 's'.
std::string actions(const ProfilingSettings& settings) {
  std::string text;
  for (int64_t step = 1; step <= 12; ++step)
    text += ".wrs"[static_cast<size_t>(profile_action(settings, step))];
  return text;
}

TEST(ProfileSchedule, WaitsWarmsUpAndRecordsTheLastSteps) {
  EXPECT_EQ(actions({.profile_freq = 6, .profiler_active = 2, .profiler_warmup = 1}), "...wrs...wrs");
  EXPECT_EQ(actions({.profile_freq = 4, .profiler_active = 1, .profiler_warmup = 3}), "wwwswwwswwws");
}

TEST(ProfileSchedule, NeedsNoWarmUp) {
  EXPECT_EQ(actions({.profile_freq = 1, .profiler_active = 1, .profiler_warmup = 0}), "ssssssssssss");
  EXPECT_EQ(actions({.profile_freq = 12, .profiler_active = 1, .profiler_warmup = 0}), "...........s");
}

/// Notes what it is told, as the job's watchdog would be.
class TraceWatcher final : public RunObserver {
 public:
  void begin(Phase phase, int64_t step) override { told += str("begin ", name_of(phase), " ", step, "; "); }
  void end(Phase phase, int64_t step, bool /*failed*/) override {
    told += str("end ", name_of(phase), " ", step, "; ");
  }
  std::string told;
};

StepProfiler::Options options_in(const std::filesystem::path& folder) {
  ProfilingSettings settings;
  settings.enable_profiling = true;
  settings.profile_freq = 2;
  settings.profiler_warmup = 1;
  return {.settings = settings, .folder = folder, .device = c10::Device(c10::kCPU)};
}

void two_steps(StepProfiler& profiler) {
  for (int64_t step = 1; step <= 2; ++step) {
    profiler.begin(Phase::Step, step);
    profiler.end(Phase::Step, step, /*failed=*/false);
  }
}

// Writing a large trace takes longer than a step may, and isn't a hang.
TEST(StepProfiler, TheWatchdogIsToldOfWritingAsOfASave) {
  data::TemporaryFolder folder;
  TraceWatcher watcher;
  StepProfiler profiler(options_in(folder.path() / "traces"));
  profiler.tell_of_writing(watcher);
  two_steps(profiler);
  EXPECT_EQ(watcher.told, "begin save 2; end save 2; ");
  EXPECT_TRUE(std::filesystem::exists(folder.path() / "traces/iteration_2/rank0_trace.json.gz"));
}

TEST(StepProfiler, WritingThatFailsEndsToo) {
  data::TemporaryFolder folder;
  std::ofstream(folder.path() / "traces") << "a file where the folder would be";
  TraceWatcher watcher;
  StepProfiler profiler(options_in(folder.path() / "traces"));
  profiler.tell_of_writing(watcher);
  two_steps(profiler);
  EXPECT_EQ(watcher.told, "begin save 2; end save 2; ");
}

}  // namespace
}  // namespace titan::train
