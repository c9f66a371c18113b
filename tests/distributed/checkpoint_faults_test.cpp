// Starts and kills whole jobs: the checkpoints that they leave can be loaded, and have the saved values.

#include <signal.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <random>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "distributed/checkpoint_case.h"
#include "e2e/command.h"
#include "titan/checkpoint/step_folder.h"

namespace titan::testing {
namespace {

namespace fs = std::filesystem;
using checkpoint::SavePhase;
using ::testing::HasSubstr;

constexpr int kRanks = 4;

std::vector<std::string> launch_words(int num_ranks, const std::vector<std::string>& words) {
  const std::string bin = std::string(TITAN_BINARY_DIR) + "/bin/";
  std::vector<std::string> all = {bin + "titan", "launch", "-n", std::to_string(num_ranks),
                                  "--log-rank",  "all",    "--", bin + "checkpoint_program"};
  all.insert(all.end(), words.begin(), words.end());
  return all;
}

const Command::Variables kOneThread = {{"OMP_NUM_THREADS", "1"}};

/// This process's own world of one rank.
const dist::World& alone() {
  static const dist::World world = dist::init({.backend = "gloo", .device = "cpu"});
  return world;
}

std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

/// Checks that every listed step is complete and has the expected values. Returns the newest.
int64_t check_steps(const fs::path& folder, const std::vector<TensorCase>& cases = toy_tensors()) {
  std::vector<std::string> problems;
  const auto newest = checkpoint::newest_complete(folder, problems);
  EXPECT_THAT(problems, ::testing::IsEmpty());
  int64_t last = 0;
  for (const auto& step : checkpoint::list_steps(folder)) {
    for (const auto& damage : checkpoint::verify_step(step.path).damages) ADD_FAILURE() << to_string(damage);
    EXPECT_NO_THROW(check_saved(step.path, step.step, cases)) << step.path;
    last = step.step;
  }
  EXPECT_EQ(newest.value_or(0), last);
  return last;
}

/// Acts as the next run: on one rank, loads the newest step (0: there is none), and removes all leftovers of
/// the run before.
void check_next_run(const fs::path& folder, int64_t newest,
                    const std::vector<TensorCase>& cases = toy_tensors()) {
  ToyJob job(alone(), cases);
  checkpoint::Checkpointer checkpointer(alone(), {}, {.folder = folder});
  job.add_to(checkpointer);
  if (newest > 0) {
    checkpointer.load(checkpoint::step_path(folder, newest));
    EXPECT_NO_THROW(job.check(newest));
  }
  for (const std::string& name : names_in(folder))
    EXPECT_TRUE(name == ".lock" || name.starts_with("step-")) << name;
}

// ---- every layout to every other

TEST(Reshard, EveryLayoutLoadsEveryOther) {
  const TempFolder folder;
  size_t num_layouts = 0;
  for (int ranks = 1; ranks <= 4; ++ranks) {
    const auto saved = run(launch_words(ranks, {"save", folder.path}), kOneThread, 100);
    ASSERT_EQ(saved.status, 0) << saved.err;
    for (const StateLayout& layout : layouts_of(ranks)) {
      check_saved(checkpoint::step_path(folder.path / layout.name(), 3), 3);
      ++num_layouts;
    }
  }
  for (int ranks = 1; ranks <= 4; ++ranks) {
    const auto loaded = run(launch_words(ranks, {"load", folder.path}), kOneThread, 100);
    EXPECT_EQ(loaded.status, 0) << loaded.err;
    EXPECT_THAT(loaded.out, HasSubstr(titan::str("loads: ", layouts_of(ranks).size() * num_layouts, "\n")));
  }
}

// ---- a rank that ends or hangs at any point

struct FaultCase {
  SavePhase phase;
  std::string how;
  int rank;
  std::string mode;
};

// Each phase and kind of fault has two cases. One uses the mode of the shipped configs, staged, in turn on
// the first rank and on the last. Without TITAN_ALL_FAULTS each phase has one of these, with the kinds in turn.
std::vector<FaultCase> fault_cases(const std::vector<std::string>& ways) {
  std::vector<FaultCase> cases;
  int turn = 0;
  for (int i = 0; i <= static_cast<int>(SavePhase::Prune); ++i) {
    const auto phase = static_cast<SavePhase>(i);
    const bool of_root =
        phase == SavePhase::WriteManifest || phase == SavePhase::Commit || phase == SavePhase::Prune;
    for (size_t way = 0; way < ways.size(); ++way) {
      const int staged = turn++ % 2;
      const std::string other = i % 2 == 0 ? "copied" : "disabled";
      for (const int at : {0, 1})
        if (std::getenv("TITAN_ALL_FAULTS") || (at == staged && way == static_cast<size_t>(i) % ways.size()))
          cases.push_back(
              {phase, ways[way], of_root || at == 0 ? 0 : kRanks - 1, at == staged ? "staged" : other});
    }
  }
  return cases;
}

void check_fault(const FaultCase& fault) {
  const std::string name =
      titan::str(to_string(fault.phase), " ", fault.how, " ", fault.rank, " ", fault.mode);
  SCOPED_TRACE(name);
  const TempFolder folder;
  const auto result = run(launch_words(kRanks, {"fail", folder.path, to_string(fault.phase), fault.how,
                                                std::to_string(fault.rank), fault.mode}),
                          kOneThread, 180);
  const bool pruning_failed = fault.phase == SavePhase::Prune && fault.how == "throw";
  // The step is complete; a message says that an older one couldn't be removed.
  EXPECT_EQ(result.status == 0, pruning_failed) << result.err;
  EXPECT_NE(result.status, 128 + SIGKILL) << "the job had to be killed: " << result.err;
  if (fault.how == "hang" || (fault.how == "throw" && !pruning_failed))
    EXPECT_THAT(result.err, HasSubstr(titan::str("rank ", fault.rank, " (")))
        << "the message must name the failed rank";
  const bool complete = fault.phase == SavePhase::Verdict || fault.phase == SavePhase::Prune;
  const int64_t newest = check_steps(folder.path);
  const int64_t before = fault.phase == SavePhase::Plan ? 0 : 1;
  EXPECT_EQ(newest, pruning_failed ? 3 : complete ? 2 : before) << result.err;
  check_next_run(folder.path, newest);
}

void check_faults(const std::vector<FaultCase>& cases, int at_once) {
  std::atomic<size_t> next{0};
  std::vector<std::jthread> threads;
  for (int i = 0; i < at_once; ++i)
    threads.emplace_back([&] {
      for (size_t at = next++; at < cases.size(); at = next++) EXPECT_NO_THROW(check_fault(cases[at]));
    });
}

TEST(Faults, StepBeforeLoadsAfterAnyFault) {
  alone();
  check_faults(fault_cases({"throw", "exit"}), 2);
}

TEST(Faults, OtherRanksEndIfOneHangs) {
  alone();
  check_faults(fault_cases({"hang"}), 5);  // these wait most of the time
}

// ---- killed at any moment

int num_kills() {
  const char* wanted = std::getenv("TITAN_KILLS");
  return wanted ? std::stoi(wanted) : 20;
}

void signal_rank(const fs::path& folder, int rank, int signal) {
  pid_t pid = 0;
  std::ifstream(folder / titan::str("pid_", rank)) >> pid;
  if (pid > 0) kill(pid, signal);
}

TEST(Kills, NewestCompleteStepIsWhatWasSaved) {
  const TempFolder folder;
  const fs::path steps = folder.path / "steps";
  // Seeded differently each time; the output names the seed, so that a run can be repeated.
  const uint64_t seed = std::random_device()();
  std::mt19937_64 random(seed);
  SCOPED_TRACE(titan::str("seed ", seed));
  int64_t newest = 0;
  for (int trial = 0; trial < num_kills(); ++trial) {
    const int victim = static_cast<int>(random() % (kRanks + 2));  // two in six: all of them
    Command job(launch_words(kRanks, {"forever", folder.path}), kOneThread);
    // A save begins only after the previous one is complete, so in the end there must be a step.
    const bool is_last_chance = newest == 0 && trial + 1 == num_kills();
    ASSERT_TRUE(job.wait_for_output(is_last_chance ? "begun 2\n" : "begun", 120)) << job.wait(0).err;
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 300'000));
    for (int rank = 0; rank < kRanks; ++rank)
      if (victim >= kRanks || victim == rank) signal_rank(folder.path, rank, SIGKILL);
    const auto result = job.wait(60);
    EXPECT_NE(result.status, 0);
    EXPECT_THAT(result.out, HasSubstr(titan::str("from ", newest, "\n"))) << result.err;
    const int64_t now = check_steps(steps);
    EXPECT_GE(now, newest) << "a step was lost";
    newest = now;
    if (HasFailure()) return;
  }
  ASSERT_GT(newest, 0) << "nothing was ever saved";
  check_next_run(steps, newest);
}

/// How much of a pending step's file of `rank` is on its way: the header is written last, and what isn't
/// written yet reads as zeros.
enum class Written { Nothing, Part, WithHeader };
Written written_of(const fs::path& steps, int rank) {
  for (const auto& leftover : checkpoint::list_leftovers(steps)) {
    const fs::path path = leftover.path / checkpoint::file_name(rank);
    std::ifstream file(path, std::ios::binary);
    if (leftover.kind != checkpoint::LeftoverKind::Pending || !file) continue;
    std::string page(4096, '\0');
    const auto has_data = [&](uint64_t offset) {
      file.clear();
      file.seekg(static_cast<std::streamoff>(offset));
      std::fill(page.begin(), page.end(), '\0');
      file.read(page.data(), static_cast<std::streamsize>(page.size()));
      return page.find_first_not_of('\0') != std::string::npos;
    };
    if (has_data(0)) return Written::WithHeader;
    std::error_code gone;
    const uint64_t num_bytes = fs::file_size(path, gone);
    for (uint64_t offset = uint64_t{1} << 20; !gone && offset < num_bytes; offset += uint64_t{1} << 20)
      if (has_data(offset)) return Written::Part;
  }
  return Written::Nothing;
}

// Each rank's file has 150 MB. The ranks are stopped before they are killed, so that what the test sees in
// the files is where the kill hits.
TEST(LargeKills, HitFilesWhileTheyAreWritten) {
  constexpr int kTwo = 2;
  const std::vector<TensorCase> cases = large_tensors();
  const TempFolder folder;
  const fs::path steps = folder.path / "steps";
  const uint64_t seed = std::random_device()();
  std::mt19937_64 random(seed);
  SCOPED_TRACE(titan::str("seed ", seed));
  int64_t newest = 0;
  int num_hits = 0;
  for (int trial = 0; trial < num_kills(); ++trial) {
    Command job(launch_words(kTwo, {"forever_large", folder.path}), kOneThread);
    ASSERT_TRUE(job.wait_for_output("from ", 120)) << job.wait(0).err;
    // Every second kill hits the second save, so that there is a step to lose.
    if (trial % 2 == 1) ASSERT_TRUE(job.wait_for_output(titan::str("begun ", newest + 2, "\n"), 120));
    const int victim = static_cast<int>(random() % (kTwo + 1));  // one in three: all of them
    const auto is_victim = [&](int rank) { return victim == kTwo || victim == rank; };
    const auto is_being_written = [&](int rank) {
      return is_victim(rank) && written_of(steps, rank) == Written::Part;
    };
    ASSERT_TRUE(wait_until([&] { return is_being_written(0) || is_being_written(1); }, 120));
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 100'000));
    for (int rank = 0; rank < kTwo; ++rank)
      if (is_victim(rank)) signal_rank(folder.path, rank, SIGSTOP);
    num_hits += is_being_written(0) || is_being_written(1);
    for (int rank = 0; rank < kTwo; ++rank)
      if (is_victim(rank)) signal_rank(folder.path, rank, SIGKILL);
    const auto result = job.wait(60);
    EXPECT_NE(result.status, 0);
    EXPECT_THAT(result.out, HasSubstr(titan::str("from ", newest, "\n"))) << result.err;
    const int64_t now = check_steps(steps, cases);
    EXPECT_GE(now, newest) << "a step was lost";
    newest = now;
    if (HasFailure()) return;
  }
  EXPECT_GT(num_hits, num_kills() / 3) << "too few kills hit a file that was being written";
  std::cout << num_hits << " of " << num_kills() << " kills hit a file that was being written\n";
  ASSERT_GT(newest, 0) << "nothing was ever saved";
  check_next_run(steps, newest, cases);
}

}  // namespace
}  // namespace titan::testing
