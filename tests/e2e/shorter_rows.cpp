// Halves the rows of a run on one rank: load it with `--experimental.custom_import`. TITAN_TEST_SHORTER_ROWS=N: from the step
// after step N on. Validation and checkpoints aren't concerned.

#include <cstdlib>
#include <memory>

#include "titan/train/policy.h"
#include "titan/train/trainer.h"

namespace {

class ShorterRows final : public titan::train::TrainerPolicy {
 public:
  ShorterRows(titan::train::TrainerParts& parts, int64_t last_step) : parts_(parts), last_step_(last_step) {}

  bool end_step(titan::train::Trainer& trainer) override {
    if (trainer.step() != last_step_) return false;
    const auto batch = parts_.loader.next();
    const auto feed = parts_.loader.feed().shared_from_this();
    std::destroy_at(&parts_.loader);
    std::construct_at(&parts_.loader, feed,
                      titan::data::LoaderOptions{.local_batch_size = batch->input_BS.size(0),
                                                 .seq_len = batch->input_BS.size(1) / 2,
                                                 .settings = {.pin_memory = true}});
    return false;
  }

 private:
  titan::train::TrainerParts& parts_;
  int64_t last_step_;
};

}  // namespace

extern "C" void titan_register() {
  titan::train::trainer_policies().add(
      "shorter_rows", [](titan::train::TrainerParts& parts) -> std::unique_ptr<titan::train::TrainerPolicy> {
        const char* step = std::getenv("TITAN_TEST_SHORTER_ROWS");
        return step ? std::make_unique<ShorterRows>(parts, std::atoll(step)) : nullptr;
      });
}
