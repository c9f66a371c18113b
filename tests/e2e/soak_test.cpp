// A long run with everything turned on: its use of the machine stays constant. 300 steps;
// TITAN_TEST_SOAK_STEPS=10000 in the nightly run.

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <thread>

#include <gtest/gtest.h>

#include "e2e/small_run.h"

namespace titan::testing {
namespace {

constexpr int kSoakRanks = 2;
constexpr int64_t kMebi = 1 << 20;
constexpr int64_t kManySteps = 10'000;
// Bytes written for each step.
constexpr int64_t kMostRow = 600, kMostEvents = 700, kMostPrinted = 600;

int64_t num_steps() {
  const char* steps = std::getenv("TITAN_TEST_SOAK_STEPS");
  return steps ? std::atoll(steps) : 300;
}

// Leaking a kilobyte each step would exceed this several times. Over few steps the heap's own settling is
// more.
int64_t most_growth(int64_t resident_bytes) {
  return num_steps() < kManySteps ? 4 * kMebi : resident_bytes / 100;
}

/// Names that distinguish entries: files by number and target, threads by id and name.
using Names = std::set<std::string>;

struct Held {
  int64_t step = 0;
  int64_t resident_bytes = 0;
  Names files, threads;
};

int64_t count_entries(const fs::path& folder) {
  std::error_code gone;
  return std::distance(fs::directory_iterator(folder, gone), {});
}

Names files_of(const fs::path& process) {
  Names files;
  std::error_code gone;
  for (const auto& entry : fs::directory_iterator(process / "fd", gone)) {
    const fs::path target = fs::read_symlink(entry.path(), gone);
    // The logs begin new files now and then; count_entries checks those.
    if (!gone && target.parent_path().filename() != "structured_logs")
      files.insert(entry.path().filename().string() + " " + target.string());
  }
  return files;
}

Names threads_of(const fs::path& process) {
  Names threads;
  std::error_code gone;
  for (const auto& entry : fs::directory_iterator(process / "task", gone)) {
    std::string name;
    if (std::ifstream comm(entry.path() / "comm"); std::getline(comm, name))
      threads.insert(entry.path().filename().string() + " " + name);
  }
  return threads;
}

Held held_by(int pid, int64_t step) {
  const fs::path process = fs::path("/proc") / std::to_string(pid);
  int64_t size = 0, resident = 0;
  std::ifstream(process / "statm") >> size >> resident;
  return {step, resident * ::sysconf(_SC_PAGESIZE), files_of(process), threads_of(process)};
}

// Reads only the last lines of the metrics, however many there are.
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

// The ranks' pids, from their logs.
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

/// Samples processes repeatedly while it lives.
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
            !held.threads.empty() && held.resident_bytes > 0 && !held.files.empty())
          held_[pid].push_back(held);
      std::this_thread::sleep_for(std::chrono::milliseconds(num_steps() < kManySteps ? 10 : 200));
    }
  }

  fs::path run_;
  std::vector<int> pids_;
  std::map<int, std::vector<Held>> held_;
  std::atomic<bool> ended_{false};
  std::thread thread_;
};

Names in_both(const Names& some, const Names& others) {
  Names both;
  std::set_intersection(some.begin(), some.end(), others.begin(), others.end(),
                        std::inserter(both, both.end()));
  return both;
}

/// The files and threads that a process held throughout a stretch of steps, and its least memory. A save or a
/// validation opens files and starts threads, but none of them lasts, however busy the machine is: a third of
/// the stretch has several saves, one after another. Leaks do last.
struct Stretch {
  int64_t num_samples = 0;
  Held always;

  Stretch(const std::vector<Held>& samples, int64_t first, int64_t last) {
    always.resident_bytes = INT64_MAX;
    const int64_t third = (last - first) / 3;
    Names begun, ended;  // threads: a list of them is cut short if one of them ends meanwhile
    for (const Held& held : samples) {
      if (held.step < first || held.step > last) continue;
      always.files = num_samples++ == 0 ? held.files : in_both(always.files, held.files);
      if (held.step <= first + third) begun.insert(held.threads.begin(), held.threads.end());
      if (held.step >= last - third) ended.insert(held.threads.begin(), held.threads.end());
      always.resident_bytes = std::min(always.resident_bytes, held.resident_bytes);
    }
    always.threads = in_both(begun, ended);
  }
};

std::string new_ones(const Names& before, const Names& now) {
  std::string text = "new:";
  for (const std::string& name : now)
    if (!before.contains(name)) text += "\n  " + name;
  return text;
}

void expect_no_growth(int pid, const Held& early, const Held& late) {
  EXPECT_LE(late.files.size(), early.files.size()) << pid << ", " << new_ones(early.files, late.files);
  EXPECT_LE(late.threads.size(), early.threads.size())
      << pid << ", " << new_ones(early.threads, late.threads);
  EXPECT_LE(late.resident_bytes - early.resident_bytes, most_growth(early.resident_bytes)) << pid;
  std::printf("process %d: %ld to %ld KiB, %zu files, %zu threads\n", pid, early.resident_bytes / 1024,
              late.resident_bytes / 1024, late.files.size(), late.threads.size());
}

int64_t bytes_below(const fs::path& folder) {
  int64_t bytes = 0;
  for (const auto& entry : fs::recursive_directory_iterator(folder))
    if (entry.is_regular_file()) bytes += static_cast<int64_t>(entry.file_size());
  return bytes;
}

TEST(Soak, ResourceUseStaysConstant) {
  const int64_t steps = num_steps(), interval = std::max<int64_t>(10, steps / 30);
  const auto folder = fresh_folder("soak");
  const fs::path run = folder / "run";
  const auto setting = [](const std::string& name, int64_t value) {
    return "--" + name + "=" + std::to_string(value);
  };
  Command training(train_words(Words{"--nproc", std::to_string(kSoakRanks)} + small_run(folder) +
                               Words{"--checkpoint.enable", "--checkpoint.async_mode=async",
                                     "--checkpoint.keep_latest_k=2", setting("checkpoint.interval", interval),
                                     setting("validation.freq", interval), setting("training.steps", steps),
                                     "--metrics.structured_logs.max_mib=1", "--metrics.enable_tensorboard",
                                     "--job.dump_folder", run.string()}),
                   {{"OMP_NUM_THREADS", "1"}});
  ASSERT_TRUE(wait_until([&] { return last_step(run) > 0 && pids_of(run).size() == kSoakRanks; }));
  std::vector<int> pids = pids_of(run);
  pids.push_back(training.pid());  // the launcher
  Watcher watcher(run, pids);
  const CommandResult result = training.wait(0.5 * static_cast<double>(steps) + 100);
  const auto held = watcher.stop();
  ASSERT_EQ(result.status, 0) << result.err;
  ASSERT_EQ(last_step(run), steps);

  ASSERT_EQ(held.size(), static_cast<size_t>(kSoakRanks + 1));
  for (const auto& [pid, samples] : held) {
    const Stretch early(samples, steps * 3 / 10, steps * 6 / 10), late(samples, steps * 7 / 10, steps - 1);
    ASSERT_GE(early.num_samples, 3);
    ASSERT_GE(late.num_samples, 3);
    expect_no_growth(pid, early.always, late.always);
  }

  // The last step has as many as the first.
  EXPECT_LE(static_cast<int64_t>(fs::file_size(run / "metrics.jsonl")), kMostRow * steps);
  EXPECT_LE(bytes_below(run / "tb"), kMostEvents * steps);
  EXPECT_LE(static_cast<int64_t>(result.out.size() + result.err.size()), kMostPrinted * steps);
  // Each rank's log was rotated and keeps to its limit.
  EXPECT_EQ(count_entries(run / "structured_logs"), 2 * kSoakRanks);
  EXPECT_LE(bytes_below(run / "structured_logs"), kSoakRanks * kMebi * 3 / 2);
  EXPECT_LE(count_entries(run / "checkpoint"), 4);  // two steps, the lock, what is being removed
  EXPECT_EQ(whole_rows(run).size(), static_cast<size_t>(steps));
}

}  // namespace
}  // namespace titan::testing
