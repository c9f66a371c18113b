// Holds a run before a step until a test releases it. Load it with `--experimental.custom_import`: each rank
// waits before step N while the folder in TITAN_TEST_STEPS has the file hold.N, and writes the file
// held.N.PID when it begins to wait. With TITAN_TEST_HELD_NORM=K it waits within the step, before the K-th
// norm that it computes there; 0: before its first forward. TITAN_TEST_HELD_OP names another operator to use
// instead of the norm, and with TITAN_TEST_HELD_RANK only that rank waits.

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <string_view>
#include <thread>

#include <ATen/record_function.h>

#include "titan/train/run_observer.h"
#include "titan/train/trainer.h"

namespace {

namespace fs = std::filesystem;

/// Announces that it waits, then waits while the folder has the file of `step`.
void wait_while_held(const fs::path& folder, int64_t step) {
  const fs::path hold = folder / ("hold." + std::to_string(step));
  if (!fs::exists(hold)) return;
  std::ofstream(folder / ("held." + std::to_string(step) + "." + std::to_string(::getpid()))) << "\n";
  while (fs::exists(hold)) std::this_thread::sleep_for(std::chrono::milliseconds(3));
}

fs::path folder_of_steps() {
  const char* folder = std::getenv("TITAN_TEST_STEPS");
  return folder ? folder : "";
}

class HeldStep : public titan::train::RunObserver {
 public:
  void begin(titan::train::Phase phase, int64_t step) override {
    if (phase == titan::train::Phase::Step) wait_while_held(folder_of_steps(), step);
  }
};

std::atomic<int64_t> step_of_norms{0}, num_norms{0};
int64_t held_norm = 0;
std::string held_op = "titan::rms_norm";

std::unique_ptr<at::ObserverContext> see_norm(const at::RecordFunction& function) {
  if (std::string_view(function.name()) == held_op && ++num_norms == held_norm)
    wait_while_held(folder_of_steps(), step_of_norms);
  return nullptr;
}

class HeldNorm : public titan::train::RunObserver {
 public:
  explicit HeldNorm(int64_t number) {
    held_norm = number;
    if (const char* op = std::getenv("TITAN_TEST_HELD_OP")) held_op = op;
    at::addGlobalCallback(at::RecordFunctionCallback(see_norm).scopes({at::RecordScope::FUNCTION}));
  }
  void begin(titan::train::Phase phase, int64_t step) override {
    if (phase == titan::train::Phase::ForwardBackward && held_norm == 0)
      wait_while_held(folder_of_steps(), step);
    if (phase != titan::train::Phase::Step) return;
    step_of_norms = step;
    num_norms = 0;
  }
};

}  // namespace

extern "C" void titan_register() {
  // Checkpointed objects see the parts of a run; this one saves nothing.
  titan::train::saved_objects().add(
      "held_step", [](titan::train::TrainerParts& parts) -> std::unique_ptr<titan::checkpoint::Stateful> {
        const char* rank = std::getenv("TITAN_TEST_HELD_RANK");
        if (rank && std::atoi(rank) != parts.world.rank()) return nullptr;
        if (const char* norm = std::getenv("TITAN_TEST_HELD_NORM")) {
          parts.observers.push_back(std::make_unique<HeldNorm>(std::atoll(norm)));
        } else {
          parts.observers.push_back(std::make_unique<HeldStep>());
        }
        return nullptr;
      });
}
