#pragma once

// Steps that a run waits before (held_step.cpp), so that a test acts at a known time.

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "e2e/command.h"
#include "e2e/training.h"

namespace titan::testing {

class HeldSteps {
 public:
  explicit HeldSteps(std::filesystem::path folder) : folder_(std::move(folder)) {}

  /// The arguments of a run that waits.
  static std::vector<std::string> words() {
    return {"--experimental.custom_import", std::string(TITAN_BINARY_DIR) + "/lib/libheld_step.so"};
  }
  Command::Variables variables() const { return {{"TITAN_TEST_STEPS", folder_.string()}}; }

  void hold(int64_t step) const { std::ofstream(folder_ / ("hold." + std::to_string(step))) << "\n"; }
  void let_go(int64_t step) const { std::filesystem::remove(folder_ / ("hold." + std::to_string(step))); }
  bool is_held(int pid, int64_t step) const {
    return std::filesystem::exists(folder_ / ("held." + std::to_string(step) + "." + std::to_string(pid)));
  }
  bool are_held(const std::vector<int>& pids, int64_t step) const {
    return std::all_of(pids.begin(), pids.end(), [&](int pid) { return is_held(pid, step); });
  }

 private:
  const std::filesystem::path folder_;
};

/// One thread per rank; waits before the steps that are held.
inline Command start_held(const std::vector<std::string>& train, const HeldSteps& steps) {
  Command::Variables variables = steps.variables();
  variables["OMP_NUM_THREADS"] = "1";
  return Command(train_words(train + HeldSteps::words()), variables);
}

}  // namespace titan::testing
