// Holds a run in front of a step until a test lets it go. As `--experimental.custom_import`: each rank waits
// in front of step N as long as the folder that TITAN_TEST_STEPS names has the file hold.N, and leaves the
// file held.N.PID when it begins to.

#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>

#include "titan/train/run_observer.h"
#include "titan/train/trainer.h"

namespace {

namespace fs = std::filesystem;

class HeldStep : public titan::train::RunObserver {
 public:
  explicit HeldStep(fs::path folder) : folder_(std::move(folder)) {}

  void begin(titan::train::Phase phase, int64_t step) override {
    if (phase != titan::train::Phase::Step) return;
    const fs::path hold = folder_ / ("hold." + std::to_string(step));
    if (!fs::exists(hold)) return;
    std::ofstream(folder_ / ("held." + std::to_string(step) + "." + std::to_string(::getpid()))) << "\n";
    while (fs::exists(hold)) std::this_thread::sleep_for(std::chrono::milliseconds(3));
  }

 private:
  fs::path folder_;
};

}  // namespace

extern "C" void titan_register() {
  // Where the parts of a run are seen; nothing of it is saved.
  titan::train::saved_objects().add(
      "held_step", [](titan::train::TrainerParts& parts) -> std::unique_ptr<titan::checkpoint::Stateful> {
        const char* folder = std::getenv("TITAN_TEST_STEPS");
        parts.observers.push_back(std::make_unique<HeldStep>(folder ? folder : ""));
        return nullptr;
      });
}
