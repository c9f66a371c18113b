// A run of many steps, with all that a run does: what it holds of its machine stays as it is. 300 steps;
// TITAN_TEST_SOAK_STEPS=10000 in the nightly run.

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <fstream>
#include <map>
#include <thread>

#include <gtest/gtest.h>

#include "e2e/small_run.h"

namespace titan::testing {
namespace {

namespace fs = std::filesystem;

constexpr int kRanks = 2;
constexpr int64_t kMebi = 1 << 20;
// Heaps settle; a kilobyte that is lost each step comes to more in 10,000.
constexpr int64_t kMostGrowth = 12 * kMebi;

int64_t num_steps() {
  const char* steps = std::getenv("TITAN_TEST_SOAK_STEPS");
  return steps ? std::atoll(steps) : 300;
}

struct Held {
  int64_t step = 0;
  int64_t resident_bytes = 0, files = 0, threads = 0;
};

int64_t count_entries(const fs::path& folder) {
  std::error_code gone;
  return std::distance(fs::directory_iterator(folder, gone), {});
}

Held held_by(int pid, int64_t step) {
  const fs::path process = fs::path("/proc") / std::to_string(pid);
  int64_t size = 0, resident = 0;
  std::ifstream(process / "statm") >> size >> resident;
  return {step, resident * ::sysconf(_SC_PAGESIZE), count_entries(process / "fd"),
          count_entries(process / "task")};
}

// By the end of its metrics, however many there are.
int64_t last_step(const fs::path& run) {
  std::ifstream rows(run / "metrics.jsonl", std::ios::ate);
  const auto size = static_cast<int64_t>(rows.tellg());
  if (size <= 0) return 0;
  rows.seekg(std::max<int64_t>(0, size - 2000));
  int64_t step = 0;
  for (std::string line; std::getline(rows, line) && !rows.eof();)
    if (const auto row = nlohmann::json::parse(line, nullptr, false); row.is_object()) step = row.at("step");
  return step;
}

// Of the ranks, as their logs say.
std::vector<int> pids_of(const fs::path& run) {
  std::vector<int> pids;
  std::error_code none;
  for (const auto& entry : fs::directory_iterator(run / "structured_logs", none)) {
    std::ifstream log(entry.path());
    if (std::string line; std::getline(log, line) && !log.eof())
      pids.push_back(nlohmann::json::parse(line).at("pid"));
  }
  return pids;
}

/// Looks at processes again and again, as long as it lives.
class Watcher {
 public:
  Watcher(fs::path run, std::vector<int> pids)
      : run_(std::move(run)), pids_(std::move(pids)), thread_([this] { watch(); }) {}
  ~Watcher() { stop(); }
  std::map<int, std::vector<Held>> stop() {
    ended_ = true;
    if (thread_.joinable()) thread_.join();
    return held_;
  }

 private:
  void watch() {
    while (!ended_) {
      const int64_t step = last_step(run_);
      for (const int pid : pids_)
        if (const Held held = held_by(pid, step);
            held.threads > 0 && held.resident_bytes > 0 && held.files > 0)
          held_[pid].push_back(held);
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }

  fs::path run_;
  std::vector<int> pids_;
  std::map<int, std::vector<Held>> held_;
  std::atomic<bool> ended_{false};
  std::thread thread_;
};

/// The least that was held in a stretch of steps: a save opens files and starts threads for a while, a leak
/// never goes below where it was.
Held least(const std::vector<Held>& samples, int64_t first, int64_t last) {
  Held least{.resident_bytes = INT64_MAX, .files = INT64_MAX, .threads = INT64_MAX};
  for (const Held& held : samples) {
    if (held.step < first || held.step > last) continue;
    ++least.step;  // their number
    least.resident_bytes = std::min(least.resident_bytes, held.resident_bytes);
    least.files = std::min(least.files, held.files);
    least.threads = std::min(least.threads, held.threads);
  }
  return least;
}

TEST(Soak, WhatARunHoldsStaysAsItIs) {
  const int64_t steps = num_steps(), interval = std::max<int64_t>(10, steps / 30);
  const auto folder = fresh_folder("soak");
  const fs::path run = folder / "run";
  const auto setting = [](const std::string& name, int64_t value) {
    return "--" + name + "=" + std::to_string(value);
  };
  Command training(train_words(Words{"--nproc", std::to_string(kRanks)} + small_run(folder) +
                               Words{"--checkpoint.enable", "--checkpoint.async_mode=async",
                                     "--checkpoint.keep_latest_k=2", setting("checkpoint.interval", interval),
                                     setting("validation.freq", interval), setting("training.steps", steps),
                                     "--metrics.structured_logs.max_mib=1", "--metrics.enable_tensorboard",
                                     "--job.dump_folder", run.string()}),
                   {{"OMP_NUM_THREADS", "1"}});
  ASSERT_TRUE(wait_until([&] { return last_step(run) > 0 && pids_of(run).size() == kRanks; }));
  std::vector<int> pids = pids_of(run);
  pids.push_back(training.pid());  // the launcher
  Watcher watcher(run, pids);
  const CommandResult result = training.wait(0.5 * static_cast<double>(steps) + 100);
  const auto held = watcher.stop();
  ASSERT_EQ(result.status, 0) << result.err;
  ASSERT_EQ(last_step(run), steps);

  ASSERT_EQ(held.size(), static_cast<size_t>(kRanks + 1));
  for (const auto& [pid, samples] : held) {
    const Held early = least(samples, steps * 3 / 10, steps * 6 / 10),
               late = least(samples, steps * 7 / 10, steps - 1);
    ASSERT_GE(early.step, 3) << "samples";
    ASSERT_GE(late.step, 3) << "samples";
    EXPECT_LE(late.files, early.files) << pid;
    EXPECT_LE(late.threads, early.threads) << pid;
    EXPECT_LE(late.resident_bytes, early.resident_bytes + kMostGrowth) << pid;
    std::printf("process %d: %ld to %ld KiB, %ld files, %ld threads\n", pid, early.resident_bytes / 1024,
                late.resident_bytes / 1024, late.files, late.threads);
  }

  // Each rank's log was rotated, and keeps to its limit.
  EXPECT_EQ(count_entries(run / "structured_logs"), 2 * kRanks);
  int64_t bytes = 0;
  for (const auto& entry : fs::directory_iterator(run / "structured_logs"))
    bytes += static_cast<int64_t>(entry.file_size());
  EXPECT_LE(bytes, kRanks * kMebi * 3 / 2);
  EXPECT_LE(count_entries(run / "checkpoint"), 4);  // two steps, the lock, what is being removed
  EXPECT_EQ(whole_rows(run).size(), static_cast<size_t>(steps));
}

}  // namespace
}  // namespace titan::testing
