#include <gtest/gtest.h>
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <nlohmann/json.hpp>

#include "observe/structured_log.h"
#include "titan/train/run_observer.h"
#include "unit/data/temporary_folder.h"

namespace titan::train {
namespace {

namespace fs = std::filesystem;
using Rows = std::vector<nlohmann::json>;

std::vector<fs::path> files_in(const fs::path& folder) {
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(folder)) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  return files;
}

Rows rows_of(const fs::path& file) {
  Rows rows;
  std::ifstream stream(file);
  for (std::string line; std::getline(stream, line);) rows.push_back(nlohmann::json::parse(line));
  return rows;
}

Rows rows_named(const Rows& rows, const std::string& name) {
  Rows found;
  std::copy_if(rows.begin(), rows.end(), std::back_inserter(found),
               [&](const auto& row) { return row.at("log_type_name") == name; });
  return found;
}

Rows rows_after(const fs::path& folder, const std::function<void(StructuredLog&)>& run) {
  {
    StructuredLog log(
        {.folder = folder / "logs", .rank = 3, .local_rank = 1, .environment = R"({"titan": "x"})"});
    run(log);
  }
  const auto files = files_in(folder / "logs");
  EXPECT_EQ(files.size(), 1u);
  EXPECT_TRUE(files.front().filename().string().starts_with("train.global_rank_3."));
  return rows_of(files.front());
}

TEST(StructuredLog, WritesSpansAndMetricsOfAStep) {
  data::TemporaryFolder folder;
  const Rows rows = rows_after(folder.path(), [](StructuredLog& log) {
    RunObservers none;
    log.begin(Phase::Step, 7);
    log.begin(Phase::ForwardBackward, 7);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    log.end(Phase::ForwardBackward, 7, false);
    log.begin(Phase::Save, 7);
    log.end(Phase::Save, 7, false);
    log.end(Phase::Step, 7, false);
    log.begin(Phase::Step, 8);
    StepMetrics metrics;
    metrics.step = 7;  // read late
    metrics.loss = 2.5;
    log.logged(metrics);
    log.end(Phase::Step, 8, false);
  });
  EXPECT_EQ(rows.front().at("environment").at("titan"), "x");
  const auto forward = rows_named(rows, "fwd_bwd_end");
  ASSERT_EQ(forward.size(), 1u);
  EXPECT_GE(forward[0].at("value"), 5.0);  // milliseconds
  EXPECT_EQ(forward[0].at("log_type"), "event");
  for (const char* key :
       {"rank", "local_rank", "host_name", "pid", "tid", "step", "relative_step", "step_tags", "time",
        "time_ms", "time_us", "delta_ms", "task_name", "caller", "seq_id"})
    EXPECT_TRUE(forward[0].contains(key)) << key;
  EXPECT_EQ(forward[0].at("rank"), 3);
  EXPECT_EQ(forward[0].at("local_rank"), 1);
  EXPECT_EQ(forward[0].at("step"), 7);
  EXPECT_EQ(forward[0].at("relative_step"), 1);
  EXPECT_EQ(forward[0].at("step_tags"), nlohmann::json::array());
  EXPECT_EQ(rows_named(rows, "loss").at(0).at("value"), 2.5);
  EXPECT_EQ(rows_named(rows, "loss").at(0).at("log_type"), "instant");
  EXPECT_EQ(rows_named(rows, "loss").at(0).at("step"), 7);
  EXPECT_EQ(rows_named(rows, "loss").at(0).at("relative_step"), 1);
  EXPECT_EQ(rows_named(rows, "training_start").size(), 1u);
  const auto steps = rows_named(rows, "step_end");
  ASSERT_EQ(steps.size(), 2u);
  EXPECT_EQ(steps[0].at("step_tags"), nlohmann::json({"checkpoint_save"}));
  EXPECT_EQ(steps[1].at("step_tags"), nlohmann::json::array());
  EXPECT_EQ(steps[1].at("relative_step"), 2);
}

TEST(StructuredLog, WritesAnErrorBeforeTheEndOfAFailedSpan) {
  data::TemporaryFolder folder;
  const Rows rows = rows_after(folder.path(), [](StructuredLog& log) {
    try {
      const StructuredSpan span(&log, "DataLoader.build");
      throw std::runtime_error("no data");
    } catch (const std::runtime_error&) {
    }
  });
  ASSERT_EQ(rows.size(), 4u);  // after the process's line
  EXPECT_EQ(rows[1].at("log_type_name"), "DataLoader.build_start");
  EXPECT_EQ(rows[2].at("log_type_name"), "DataLoader.build_error");
  EXPECT_EQ(rows[3].at("log_type_name"), "DataLoader.build_end");
}

TEST(StructuredLog, LosesNoEventOfSeveralThreads) {
  data::TemporaryFolder folder;
  constexpr int kThreads = 4, kEvents = 500;
  const Rows rows = rows_after(folder.path(), [](StructuredLog& log) {
    std::vector<std::thread> threads;
    for (int thread = 0; thread < kThreads; ++thread)
      threads.emplace_back([&log] {
        for (int i = 0; i < kEvents; ++i) log.instant("tick", i);
      });
    for (std::thread& thread : threads) thread.join();
  });
  ASSERT_EQ(rows.size(), 1u + kThreads * kEvents);
  for (size_t i = 0; i < rows.size(); ++i) EXPECT_EQ(rows[i].at("seq_id"), i);
}

TEST(StructuredLog, WritesEventsToTheFileOnFlush) {
  data::TemporaryFolder folder;
  StructuredLog log({.folder = folder.path() / "logs"});
  log.instant("before");
  log.flush();
  const auto files = files_in(folder.path() / "logs");
  ASSERT_EQ(files.size(), 1u);
  EXPECT_EQ(rows_named(rows_of(files[0]), "before").size(), 1u);
}

TEST(StructuredLog, DropsTheOlderHalfWhenFull) {
  data::TemporaryFolder folder;
  constexpr int64_t kMost = 40'000;
  {
    StructuredLog log(
        {.folder = folder.path() / "logs", .max_bytes = kMost, .environment = R"({"titan": "x"})"});
    for (int i = 0; i < 1000; ++i) {
      log.instant("tick", i);
      if (i % 20 == 19) log.flush();
    }
  }
  const auto files = files_in(folder.path() / "logs");
  ASSERT_EQ(files.size(), 2u);
  const Rows earlier = rows_of(files[0]), current = rows_of(files[1]);
  EXPECT_TRUE(files[0].string().ends_with(".earlier.jsonl"));
  // A flush's events may exceed the limit.
  EXPECT_LT(fs::file_size(files[0]) + fs::file_size(files[1]), kMost + 10'000u);
  EXPECT_TRUE(earlier.front().contains("environment"));
  EXPECT_TRUE(current.front().contains("environment"));
  EXPECT_EQ(current.back().at("value"), 999);
  // No gap between the two.
  EXPECT_EQ(current.at(1).at("value").get<double>(), earlier.back().at("value").get<double>() + 1);
}

TEST(StructuredLog, FileNamesSortByStartTime) {
  std::vector<std::string> stems;
  for (int i = 0; i < 20; ++i) {
    stems.push_back(structured_stem(2));
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  EXPECT_TRUE(std::is_sorted(stems.begin(), stems.end()));
  // In UTC, in whatever time zone a process runs.
  const char* zone = std::getenv("TZ");
  const std::string before = zone ? zone : "";
  setenv("TZ", "UTC+10", 1);
  tzset();
  const std::string far = structured_stem(2);
  zone ? setenv("TZ", before.c_str(), 1) : unsetenv("TZ");
  tzset();
  EXPECT_GT(far, stems.back());
}

TEST(StructuredLog, WarnsOnceWhenItCannotBeWritten) {
  data::TemporaryFolder folder;
  std::ofstream(folder.path() / "a_file") << "in the way";
  ::testing::internal::CaptureStderr();
  {
    StructuredLog log({.folder = folder.path() / "a_file" / "logs"});
    log.instant("tick");
    log.flush();
    log.instant("tick");
    log.flush();
  }
  const std::string log = ::testing::internal::GetCapturedStderr();
  const size_t warning = log.find("the structured log has a gap");
  EXPECT_NE(warning, std::string::npos) << log;
  EXPECT_EQ(log.find("the structured log has a gap", warning + 1), std::string::npos) << log;
  EXPECT_TRUE(fs::is_regular_file(folder.path() / "a_file"));
}

// Once the file system is back, the log continues, and says how much it lost.
TEST(StructuredLog, ContinuesAfterAnError) {
  data::TemporaryFolder folder;
  const fs::path logs = folder.path() / "logs";
  std::ofstream(logs) << "in the way";
  StructuredLog log(
      {.folder = logs, .retry = std::chrono::milliseconds(0), .environment = R"({"titan": "x"})"});
  log.instant("lost");
  log.flush();
  log.instant("lost too");
  log.flush();
  fs::remove(logs);
  log.instant("there");
  log.flush();
  const auto files = files_in(logs);
  ASSERT_EQ(files.size(), 1u);
  const Rows rows = rows_of(files[0]);
  EXPECT_TRUE(rows.front().contains("environment"));
  EXPECT_EQ(rows_named(rows, "there").size(), 1u);
  ASSERT_EQ(rows_named(rows, "events_dropped").size(), 1u);
  EXPECT_EQ(rows_named(rows, "events_dropped")[0].at("value"), 2);
}

// The existing file may end within a line.
TEST(StructuredLog, AppendsAfterHalfALine) {
  data::TemporaryFolder folder;
  StructuredFile file(folder.path(), "stem", 1000);
  file.open("{\"head\": 1}\n");
  file.append("{\"half");
  file.close();
  file.reopen("{\"head\": 2}\n");
  file.append("{\"whole\": 3}\n");
  std::ifstream stream(folder.path() / "stem.jsonl");
  std::vector<std::string> lines;
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  EXPECT_EQ(lines, (std::vector<std::string>{"{\"head\": 1}", "{\"half", "{\"head\": 2}", "{\"whole\": 3}"}));
}

TEST(StructuredLog, KeepsTheLogsOfTheNewestProcesses) {
  data::TemporaryFolder folder;
  const auto touch = [&](const std::string& name) { std::ofstream(folder.path() / name) << "{}\n"; };
  for (const char* time : {"20260101-000000-000001", "20260101-000000-000002", "20260102-000000-000000"}) {
    touch(std::string("train.global_rank_1.") + time + "-aaaaaa.jsonl");
    touch(std::string("train.global_rank_1.") + time + "-aaaaaa.earlier.jsonl");
  }
  touch("train.global_rank_10.20250101-000000-000000-aaaaaa.jsonl");
  {
    StructuredLog log({.folder = folder.path(), .rank = 1, .kept_processes = 2});
    log.instant("tick");
  }
  std::vector<std::string> names;
  for (const fs::path& file : files_in(folder.path())) names.push_back(file.filename());
  ASSERT_EQ(names.size(), 4u) << ::testing::PrintToString(names);
  EXPECT_EQ(names[0], "train.global_rank_1.20260102-000000-000000-aaaaaa.earlier.jsonl");
  EXPECT_EQ(names[1], "train.global_rank_1.20260102-000000-000000-aaaaaa.jsonl");
  EXPECT_EQ(names[3], "train.global_rank_10.20250101-000000-000000-aaaaaa.jsonl");  // another rank's
}

// Events may have been queued while the disk stalled.
TEST(StructuredLog, KeepsItsLimitForALargeBatch) {
  data::TemporaryFolder folder;
  constexpr int64_t kMost = 80'000;
  {
    StructuredLog log({.folder = folder.path() / "logs", .max_bytes = kMost});
    for (int i = 0; i < 3000; ++i) log.instant("tick", i);
  }
  uint64_t bytes = 0;
  for (const fs::path& file : files_in(folder.path() / "logs")) {
    EXPECT_LE(fs::file_size(file), kMost / 2 + kMost / 8 + 1000) << file;
    bytes += fs::file_size(file);
  }
  EXPECT_LE(bytes, kMost * 5 / 4 + 2000u);
}

TEST(StructuredLog, WritesTheWaitForOthersDataAsASpan) {
  data::TemporaryFolder folder;
  const Rows rows = rows_after(folder.path(), [](StructuredLog& log) {
    log.begin(Phase::Step, 1);
    log.begin(Phase::Data, 1);
    log.end(Phase::Data, 1, false);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    log.begin(Phase::ForwardBackward, 1);
    log.end(Phase::ForwardBackward, 1, false);
    log.end(Phase::Step, 1, false);
    log.begin(Phase::Step, 2);  // all ranks agree not to make it
    log.begin(Phase::Data, 2);
    log.end(Phase::Data, 2, false);
    log.end(Phase::Step, 2, false);
    log.stopped(15);
  });
  const auto waits = rows_named(rows, "post_dataloading_process_end");
  ASSERT_EQ(waits.size(), 2u);
  EXPECT_GE(waits[0].at("value"), 5.0);
  EXPECT_EQ(rows_named(rows, "post_dataloading_process_start").size(), 2u);
  EXPECT_EQ(rows_named(rows, "stopped").at(0).at("value"), 15);
}

// The training thread pays for a queue, not for a file: about 0.1 us per event. A write per line would take
// several.
TEST(StructuredLog, CostsTheCallerLittlePerEvent) {
  data::TemporaryFolder folder;
  StructuredLog log({.folder = folder.path() / "logs"});
  double best_ns = 1e9;
  for (int round = 0; round < 20; ++round) {
    constexpr int kPairs = 500;
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < kPairs; ++i) {
      log.begin(Phase::Data, 1);
      log.end(Phase::Data, 1, false);
    }
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - start;
    best_ns = std::min(best_ns, took.count() / (2 * kPairs));
  }
  RecordProperty("ns_per_event", static_cast<int>(best_ns));
  std::printf("%.0f ns per event\n", best_ns);
  EXPECT_LT(best_ns, 2000);
}

}  // namespace
}  // namespace titan::train
