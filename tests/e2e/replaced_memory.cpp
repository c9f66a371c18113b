// After step 5, the last rank notes that a buffer of its own was replaced: load it with `--experimental.custom_import`.

#include <memory>

#include "dist/device_backend.h"
#include "titan/train/policy.h"
#include "titan/train/trainer.h"

namespace {

struct ReplacedMemory final : titan::train::TrainerPolicy {
  bool end_step(titan::train::Trainer& trainer) override {
    const auto& world = trainer.parts().world;
    if (trainer.step() == 5 && world.rank() + 1 == world.size()) titan::dist::note_replaced_memory();
    return false;
  }
};

}  // namespace

extern "C" void titan_register() {
  titan::train::trainer_policies().add(
      "replaced_memory", [](titan::train::TrainerParts&) -> std::unique_ptr<titan::train::TrainerPolicy> {
        return std::make_unique<ReplacedMemory>();
      });
}
