// An object in the checkpoints that waits or fails while certain files are in the folder TITAN_TEST_SAVES.
// Load it with `--experimental.custom_import`.
//   hold_saving     state() of a save waits while the file is there, in the training thread
//   hold_writing    so does rank 0's part after it, in the background of an asynchronous save
//   hold_loading    so does loaded()
//   hold_building   so does the rank that makes the object, while the run starts
//   fail_saves      saves fail; fail_every_other: the first, the third ...
// A rank that waits leaves a file: saving.RANK, writing.RANK, loading.RANK, building.RANK. Each save appends
// a dot to the file saves.

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "titan/core/error.h"
#include "titan/train/trainer.h"

namespace {

namespace fs = std::filesystem;

class WaitingState : public titan::checkpoint::Stateful {
 public:
  WaitingState(fs::path folder, int rank) : folder_(std::move(folder)), rank_(rank) {
    wait_while("hold_building", "building");
  }

  titan::checkpoint::ObjectState state() override {
    wait_while("hold_saving", "saving");
    return {.tensors = {}, .text = "state", .merge = [this](const std::vector<std::string>& /*texts*/) {
              wait_while("hold_writing", "writing");
              if (!folder_.empty()) std::ofstream(folder_ / "saves", std::ios::app) << '.';
              const bool is_odd = num_saves_++ % 2 == 0;
              if (fs::exists(folder_ / "fail_saves") || (is_odd && fs::exists(folder_ / "fail_every_other")))
                throw titan::Error("the test wants this save to fail");
              return std::string("state");
            }};
  }
  void loaded(const std::string& /*text*/) override { wait_while("hold_loading", "loading"); }

 private:
  void wait_while(const char* held, const std::string& who) const {
    while (fs::exists(folder_ / held)) {
      std::ofstream(folder_ / (who + "." + std::to_string(rank_))) << "\n";
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }

  fs::path folder_;
  int rank_;
  std::atomic<int> num_saves_{0};
};

}  // namespace

extern "C" void titan_register() {
  titan::train::saved_objects().add("waiting", [](titan::train::TrainerParts& parts) {
    const char* folder = std::getenv("TITAN_TEST_SAVES");
    return std::make_unique<WaitingState>(folder ? folder : "", parts.world.rank());
  });
}
