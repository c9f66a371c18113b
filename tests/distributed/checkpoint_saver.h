#pragma once

// For checkpoint tests that run on all ranks: a shared folder, a job that saves there, and checks of the
// folder's contents.

#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "distributed/checkpoint_case.h"
#include "distributed/world.h"
#include "titan/checkpoint/step_folder.h"

namespace titan::testing {

namespace fs = std::filesystem;
using checkpoint::Checkpointer;
using checkpoint::SaveOptions;

inline constexpr dist::Label kLabel{.phase = "checkpoint test"};

inline void meet() { world().everyone()->barrier(kLabel).wait(); }

/// A folder that is the same on all ranks, and removed after the test.
class SharedFolder {
 public:
  SharedFolder() {
    std::string name = (fs::temp_directory_path() / "titan_checkpointer_XXXXXX").string();
    if (world().rank() == 0 && !mkdtemp(name.data())) throw Error("mkdtemp: " + name);
    path_ = world().everyone()->all_gather_text(name, kLabel)[0];
  }
  ~SharedFolder() {
    // All ranks get here only if the test passed.
    if (::testing::Test::HasFailure()) return;
    meet();
    std::error_code ignored;
    if (world().rank() == 0) fs::remove_all(path_, ignored);
  }
  operator const fs::path&() const { return path_; }
  fs::path operator/(const std::string& name) const { return path_ / name; }

 private:
  fs::path path_;
};

/// "rank 3 (": part of a message about the last rank. Messages don't number a single rank.
inline std::string last_rank() {
  return world().size() == 1 ? "" : titan::str("rank ", world().size() - 1, " (");
}

inline bool is_last() { return world().rank() == world().size() - 1; }

inline std::vector<int64_t> steps_in(const fs::path& folder) {
  meet();  // rank 0 may still prune
  std::vector<int64_t> steps;
  for (const checkpoint::StepEntry& entry : checkpoint::list_steps(folder)) steps.push_back(entry.step);
  return steps;
}

/// Names in the folder other than complete steps and the lock.
inline std::vector<std::string> leftovers(const fs::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (name != ".lock" && !name.starts_with("step-")) names.push_back(name);
  }
  return names;
}

struct Saver {
  explicit Saver(const SaveOptions& options) : job(world()), checkpointer(world(), {}, options) {
    job.add_to(checkpointer);
  }
  void fill_and_save(int64_t step) {
    job.fill(step);
    checkpointer.save(step);
  }
  ToyJob job;
  Checkpointer checkpointer;
};

}  // namespace titan::testing
