// The rank program of the checkpoint tests:
//   checkpoint_program save FOLDER
//       saves under every layout of that many ranks, to FOLDER/LAYOUT
//   checkpoint_program load FOLDER
//       loads each of these under every layout of that many ranks
//   checkpoint_program fail FOLDER PHASE HOW RANK MODE
//       saves steps 1 to 3; at PHASE of the save of step 2, RANK does HOW (throw, exit or hang). If PHASE is
//       Plan, which only the first save has, that happens in step 1. MODE: disabled, copied, staged
//   checkpoint_program forever|forever_large FOLDER
//       loads the newest step, checks it, and saves the following ones; forever_large: of 300 MB
// A failure ends a rank with exit code 3.

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include "distributed/checkpoint_case.h"
#include "titan/checkpoint/step_folder.h"

namespace titan::testing {
namespace {

using checkpoint::AsyncMode;
using checkpoint::Checkpointer;
using checkpoint::SaveOptions;
using checkpoint::SavePhase;
using Words = std::vector<std::string>;

constexpr int64_t kStep = 3;

void save_all(const dist::World& world, const std::filesystem::path& folder) {
  for (const StateLayout& layout : layouts_of(world.size())) {
    ToyJob job(world, layout);
    Checkpointer checkpointer(world, job.mesh["pp"], {.folder = folder / layout.name()});
    job.add_to(checkpointer);
    job.fill(kStep);
    checkpointer.save(kStep);
  }
}

void load_all(const dist::World& world, const std::filesystem::path& folder) {
  int num_loads = 0;
  for (const StateLayout& layout : layouts_of(world.size())) {
    Checkpointer checkpointer(world, ToyJob(world, layout).mesh["pp"], {.folder = folder / "loader"});
    ToyJob job(world, layout);
    job.add_to(checkpointer);
    for (int saved_ranks = 1; saved_ranks <= 4; ++saved_ranks) {
      for (const StateLayout& saved : layouts_of(saved_ranks)) {
        job.fill(0);
        checkpointer.load(checkpoint::step_path(folder / saved.name(), kStep));
        job.check(kStep);
        ++num_loads;
      }
    }
  }
  if (world.rank() == 0) std::cout << "loads: " << num_loads << std::endl;
}

SavePhase phase_of(const std::string& name) {
  for (int phase = 0; phase <= static_cast<int>(SavePhase::Prune); ++phase)
    if (name == to_string(static_cast<SavePhase>(phase))) return static_cast<SavePhase>(phase);
  throw Error("no phase " + name);
}

AsyncMode mode_of(const std::string& name) {
  if (name == "disabled") return AsyncMode::Disabled;
  if (name == "copied") return AsyncMode::Copied;
  if (name == "staged") return AsyncMode::Staged;
  throw Error("no mode " + name);
}

void fail_as(const std::string& how) {
  if (how == "exit") _exit(9);
  while (how == "hang") pause();
  throw Error("told to throw");
}

void save_and_fail(const dist::World& world, const Words& words) {
  const SavePhase phase = phase_of(words.at(2));
  const bool chosen = world.rank() == std::stoi(words.at(4));
  bool armed = phase == SavePhase::Plan;
  // The other ranks wait for a hung rank until the timeout, so it is short. With other faults nothing waits
  // that long, and a phase may need more time on a busy machine.
  const std::chrono::seconds timeout(words.at(3) == "hang" ? 10 : 30);
  SaveOptions options{.folder = words.at(1), .keep_latest = 5, .timeout = timeout};
  options.async = mode_of(words.at(5));
  options.on_phase = [&](SavePhase at) {
    if (!armed || !chosen || at != phase) return;
    // A rank may reach this phase before rank 0 has renamed the folder; ending now would stop rank 0.
    if (at == SavePhase::Verdict)
      while (!std::filesystem::exists(checkpoint::step_path(options.folder, 2))) usleep(1000);
    fail_as(words.at(3));
  };
  ToyJob job(world);
  Checkpointer checkpointer(world, {}, options);
  job.add_to(checkpointer);
  for (int64_t step = 1; step <= 3; ++step) {
    job.fill(step);
    checkpointer.save(step);
    checkpointer.wait_for_staging();
    checkpointer.finish();
    armed = true;
  }
}

void write_pid(const std::filesystem::path& folder, int rank) {
  std::ofstream(folder / titan::str("pid_", rank)) << getpid() << std::endl;
}

void save_forever(const dist::World& world, const std::filesystem::path& folder,
                  const std::vector<TensorCase>& cases) {
  write_pid(folder, world.rank());
  SaveOptions options{.folder = folder / "steps", .keep_latest = 3, .timeout = std::chrono::seconds(20)};
  options.async = AsyncMode::Staged;
  ToyJob job(world, cases);
  Checkpointer checkpointer(world, {}, options);
  job.add_to(checkpointer);
  std::vector<std::string> problems;
  const auto newest = checkpoint::newest_complete(options.folder, problems);
  // Every rank looks before the first one continues and changes the folder.
  world.everyone()->barrier({"checkpoint_program::start"}).wait();
  if (newest) {
    checkpointer.load(checkpoint::step_path(options.folder, *newest));
    job.check(*newest);
  }
  if (world.rank() == 0) std::cout << "from " << newest.value_or(0) << std::endl;
  for (int64_t step = newest.value_or(0) + 1;; ++step) {
    job.fill(step);
    checkpointer.save(step);
    checkpointer.wait_for_staging();
    if (world.rank() == 0) std::cout << "begun " << step << std::endl;
  }
}

void act(const dist::World& world, const Words& words) {
  const std::string& what = words.at(0);
  if (what == "save") return save_all(world, words.at(1));
  if (what == "load") return load_all(world, words.at(1));
  if (what == "fail") return save_and_fail(world, words);
  if (what == "forever") return save_forever(world, words.at(1), toy_tensors());
  if (what == "forever_large") return save_forever(world, words.at(1), large_tensors());
  throw Error("unknown word " + what);
}

}  // namespace
}  // namespace titan::testing

int main(int argc, char** argv) {
  titan::testing::run_rank(std::chrono::seconds(30), [&](const auto& world) {
    titan::testing::act(world, {argv + 1, argv + argc});
  });
}
