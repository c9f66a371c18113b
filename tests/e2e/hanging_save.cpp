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
  explicit HangingState(int rank) : rank_(rank) {}
  titan::checkpoint::ObjectState state() override {
    const char* hangs = std::getenv("TITAN_TEST_HANGING_RANK");
    while (hangs && std::atoi(hangs) == rank_) ::pause();
    return {.tensors = {}, .text = "state"};
  }
  void loaded(const std::string& /*text*/) override {}

 private:
  int rank_;
};

}  // namespace

extern "C" void titan_register() {
  titan::train::saved_objects().add("hanging", [](titan::train::TrainerParts& parts) {
    return std::make_unique<HangingState>(parts.world.rank());
  });
}
