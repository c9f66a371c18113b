// Holds a run in front of a step until a test lets it go. As `--experimental.custom_import`: each rank waits
// in front of step N as long as the folder that TITAN_TEST_STEPS names has the file hold.N, and leaves the
// file held.N.PID when it begins to. A rank whose TITAN_TEST_HELD is "forward" waits in front of the step's
// first forward, when its peers know that all have come to the step.

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
  HeldStep(fs::path folder, titan::train::Phase phase) : folder_(std::move(folder)), phase_(phase) {}

  void begin(titan::train::Phase phase, int64_t step) override {
    if (phase != phase_) return;
    const fs::path hold = folder_ / ("hold." + std::to_string(step));
    if (!fs::exists(hold)) return;
    std::ofstream(folder_ / ("held." + std::to_string(step) + "." + std::to_string(::getpid()))) << "\n";
    while (fs::exists(hold)) std::this_thread::sleep_for(std::chrono::milliseconds(3));
  }

 private:
  fs::path folder_;
  titan::train::Phase phase_;
};

}  // namespace

extern "C" void titan_register() {
  // Where the parts of a run are seen; nothing of it is saved.
  titan::train::saved_objects().add(
      "held_step", [](titan::train::TrainerParts& parts) -> std::unique_ptr<titan::checkpoint::Stateful> {
        using titan::train::Phase;
        const char *folder = std::getenv("TITAN_TEST_STEPS"), *held = std::getenv("TITAN_TEST_HELD");
        const bool forward = held && std::string(held) == "forward";
        parts.observers.push_back(
            std::make_unique<HeldStep>(folder ? folder : "", forward ? Phase::ForwardBackward : Phase::Step));
        return nullptr;
      });
}
