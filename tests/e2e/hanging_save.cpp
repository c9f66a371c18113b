// An object in the checkpoints whose state one rank never returns: a save that hangs. Load it with
// `--experimental.custom_import`; TITAN_TEST_HANGING_RANK sets the rank.

#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <string>

#include "titan/train/trainer.h"

namespace {

class HangingState : public titan::checkpoint::Stateful {
 public:
  // On a GPU, memory for saves is made at the start, by the sizes of what will be saved.
  HangingState(int rank, bool is_on_gpu) : rank_(rank), num_plans_(is_on_gpu ? 1 : 0) {}
  titan::checkpoint::ObjectState state() override {
    const char* hangs = std::getenv("TITAN_TEST_HANGING_RANK");
    while (num_plans_-- <= 0 && hangs && std::atoi(hangs) == rank_) ::pause();
    return {.tensors = {}, .text = "state"};
  }
  void loaded(const std::string& /*text*/) override {}

 private:
  int rank_, num_plans_;
};

}  // namespace

extern "C" void titan_register() {
  titan::train::saved_objects().add("hanging", [](titan::train::TrainerParts& parts) {
    return std::make_unique<HangingState>(parts.world.rank(), parts.device.is_cuda());
  });
}
