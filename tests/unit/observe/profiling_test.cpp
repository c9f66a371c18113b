#include <gtest/gtest.h>
#include <filesystem>
#include <fstream>
#include <string>

#include "observe/profiling.h"
#include "titan/core/error.h"
#include "unit/data/temporary_folder.h"

namespace titan::train {
namespace {

// For steps 1 to 12: '.' none, 'w' warm-up, 'r' record, 's' record and save.
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

TEST(ProfileSchedule, WorksWithoutWarmUp) {
  EXPECT_EQ(actions({.profile_freq = 1, .profiler_active = 1, .profiler_warmup = 0}), "ssssssssssss");
  EXPECT_EQ(actions({.profile_freq = 12, .profiler_active = 1, .profiler_warmup = 0}), "...........s");
}

/// Records the calls that the job's watchdog would get.
class CallRecorder final : public RunObserver {
 public:
  void begin(Phase phase, int64_t step) override { calls += str("begin ", name_of(phase), " ", step, "; "); }
  void end(Phase phase, int64_t step, bool /*failed*/) override {
    calls += str("end ", name_of(phase), " ", step, "; ");
  }
  std::string calls;
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

// Writing a large trace may take longer than a step is allowed to, and isn't a hang.
TEST(StepProfiler, ReportsWritingToTheWatchdogAsASave) {
  data::TemporaryFolder folder;
  CallRecorder watchdog;
  StepProfiler profiler(options_in(folder.path() / "traces"));
  profiler.report_writing_to(watchdog);
  two_steps(profiler);
  EXPECT_EQ(watchdog.calls, "begin save 2; end save 2; ");
  EXPECT_TRUE(std::filesystem::exists(folder.path() / "traces/iteration_2/rank0_trace.json.gz"));
}

TEST(StepProfiler, KeepsTheTraceOfAnEarlierRun) {
  data::TemporaryFolder folder;
  for (int run = 0; run < 2; ++run) {
    StepProfiler profiler(options_in(folder.path() / "traces"));
    two_steps(profiler);
  }
  EXPECT_TRUE(std::filesystem::exists(folder.path() / "traces/iteration_2/rank0_trace.json.gz"));
  EXPECT_TRUE(std::filesystem::exists(folder.path() / "traces/iteration_2/rank0_trace.1.json.gz"));
}

TEST(StepProfiler, EndsTheReportedSaveWhenWritingFails) {
  data::TemporaryFolder folder;
  std::ofstream(folder.path() / "traces") << "a file where the folder would be";
  CallRecorder watchdog;
  StepProfiler profiler(options_in(folder.path() / "traces"));
  profiler.report_writing_to(watchdog);
  two_steps(profiler);
  EXPECT_EQ(watchdog.calls, "begin save 2; end save 2; ");
}

std::string joined(const std::vector<std::string_view>& pieces) {
  std::string all;
  for (const std::string_view piece : pieces) all += piece;
  return all;
}

// A GPU's events as Kineto writes them.
constexpr const char* kTrace = R"(
  {
    "name": "thread_name", "ph": "M", "ts": 1.0, "pid": 0, "tid": 7,
    "args": { "name": "stream 7 " }
  },
  {
    "name": "thread_name", "ph": "M", "ts": 1.0, "pid": 0, "tid": 77,
    "args": { "name": "stream 77 " }
  },
  {
    "ph": "X", "cat": "user_annotation", "name": "stream: fsdp gather", "pid": 40, "tid": 40,
    "ts": 1.0, "dur": 2.0
  },
  {
    "ph": "X", "cat": "gpu_user_annotation", "name": "stream: fsdp gather", "pid": 0, "tid": 7,
    "ts": 1.0, "dur": 2.0
  })";

TEST(StreamRows, AddsTheNameOfAMarkedStream) {
  const std::string named = joined(with_stream_names(kTrace));
  EXPECT_NE(named.find(R"("name": "stream 7 fsdp gather ")"), std::string::npos) << named;
  EXPECT_NE(named.find(R"("name": "stream 77 ")"), std::string::npos) << named;
  EXPECT_EQ(named.size(), std::string(kTrace).size() + std::string(" fsdp gather").size());
}

TEST(StreamRows, LeavesATraceWithoutMarksUnchanged) {
  const std::string trace = R"({"name": "stream 7 "})";
  EXPECT_EQ(joined(with_stream_names(trace)), trace);
  EXPECT_EQ(joined(with_stream_names("")), "");
}

}  // namespace
}  // namespace titan::train
