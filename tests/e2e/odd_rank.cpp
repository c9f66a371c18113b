// A rank that makes an extra call before its seventh step, so the ranks lose their common order. Load it with
// `--experimental.custom_import` in a run that saves checkpoints; TITAN_TEST_ODD_RANK sets the rank.

#include <cstdlib>
#include <memory>
#include <string>

#include <ATen/ATen.h>

#include "titan/dist/collectives.h"
#include "titan/train/run_observer.h"
#include "titan/train/trainer.h"

namespace {

using titan::train::Phase;

class OddRank : public titan::train::RunObserver {
 public:
  explicit OddRank(const titan::dist::World& world) : world_(world) {}
  void begin(Phase phase, int64_t step) override {
    const char* odd = std::getenv("TITAN_TEST_ODD_RANK");
    if (phase != Phase::Step || step != 7 || !odd || std::atoi(odd) != world_.rank()) return;
    at::Tensor seven = at::ones({7});
    world_.everyone()->broadcast(seven, 0, {"odd::one", "more"}).wait();
  }

 private:
  titan::dist::World world_;
};

class NoState : public titan::checkpoint::Stateful {
 public:
  titan::checkpoint::ObjectState state() override { return {.tensors = {}, .text = "state"}; }
  void loaded(const std::string& /*text*/) override {}
};

}  // namespace

// Only checkpointed objects get a trainer's parts.
extern "C" void titan_register() {
  titan::train::saved_objects().add("odd", [](titan::train::TrainerParts& parts) {
    parts.observers.push_back(std::make_unique<OddRank>(parts.world));
    return std::make_unique<NoState>();
  });
}
