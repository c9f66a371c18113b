#pragma once

// [Note: policies]
// The trainer's loop computes, saves and resumes. Everything else that decides about a run is a policy:
// whether a step that went wrong is skipped, when the run stops early or goes back to a checkpoint, what is
// compared or validated between steps. The loop calls its policies in their order, at fixed places of a step;
// a policy overrides the two or three hooks that it needs. Every rank has the same policies, and each hook is
// called by the training thread of every rank, so a hook may be collective. Apart from vote(), all ranks have
// to come to the same result.
//
// Your own policy, in your program or in a shared object (experimental.custom_import):
//
//   struct StopWhenGood : titan::train::TrainerPolicy {
//     void judge(Trainer& trainer, const StepValues& values) override {
//       good = trainer.loss_of_all(values) < 2;
//     }
//     Vote vote() override { return good ? Vote::Stop : Vote::Go; }
//     bool good = false;
//   };
//   titan::train::trainer_policies().add("stop_when_good", [](TrainerParts&) {
//     return std::make_unique<StopWhenGood>();
//   });

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "titan/core/registry.h"
#include "titan/data/loader.h"
#include "titan/optim/clip.h"
#include "titan/train/run_end.h"

namespace titan::train {

class Trainer;
struct StepMetrics;
struct TrainerParts;

/// The labels of a step that count: those that aren't -100.
struct TokenCounts {
  int64_t local = 0;   ///< in this rank's rows, over its micro-batches
  int64_t global = 0;  ///< in the rows of all ranks
};

/// What a step computes on: enough to run it again.
struct StepInput {
  std::vector<data::Batch> batches;
  TokenCounts tokens;
};

/// What the host learns from a step.
struct StepValues {
  int64_t step = 0;
  double local_loss = 0;  ///< this rank's part of the loss
  int loss_rank = -1;     ///< lowest rank whose loss isn't finite; -1: all are
  optim::GradNorm grad_norm;
  bool finite() const { return loss_rank < 0 && grad_norm.finite(); }
};

/// A step whose loss or gradient norm isn't finite.
struct NonFiniteStep {
  StepValues values;
  StepInput input;
  std::string problem;  ///< "step 7: the loss isn't finite on rank 3"
};

/// Go: this rank is ready for the next step. Stop: the run is to end before it, and saves its state. Fail: a
/// checkpoint of this rank has failed.
enum class Vote : uint8_t { Go, Stop, Fail };

class TrainerPolicy {
 public:
  virtual ~TrainerPolicy() = default;

  // ---- whether the run goes on

  /// This rank's vote in the exchange of token counts that every step and every batch of a validation begins
  /// with. One Stop ends the run before that step, after saving the whole state.
  virtual Vote vote() { return Vote::Go; }
  /// Asked every 0.1 s while this rank waits for data. True: it gives up waiting, and vote() has to be Stop
  /// from then on.
  virtual bool gives_up_waiting() { return false; }
  /// Why the run stops, if this policy stopped it. Called once all ranks have agreed to stop.
  virtual std::optional<StopCause> stop_cause() { return std::nullopt; }
  /// The run stops: nothing that this policy prepares will be used.
  virtual void stopped() {}

  // ---- a step's numbers: called at the end of the step, or one step later where they are read late

  /// All of them are finite.
  virtual void judge(Trainer& /*trainer*/, const StepValues& /*values*/) {}
  /// Not all of them are: `problem` says which. The weights are those from before the step. True: the run
  /// continues with the next batch. False leaves the decision to the other policies; if none skips the step,
  /// the run ends with an UnsoundRun. Throws UnsoundRun to end it at once; `explain` gives what all policies
  /// find out about the cause.
  virtual bool skip(const std::string& /*problem*/, const std::function<std::string()>& /*explain*/) {
    return false;
  }
  /// Finds out where such numbers come from, for the error message. The run ends afterwards.
  virtual std::string explain(Trainer& /*trainer*/, const NonFiniteStep& /*step*/) { return ""; }

  // ---- state that changes

  /// Called before the optimizer changes the weights, when no save reads the state any more.
  virtual void before_update() {}
  /// The step is over. True: the trainer's state is no longer that of this step (Trainer::load_before), so
  /// nothing else is done at its end.
  virtual bool end_step(Trainer& /*trainer*/) { return false; }
  /// The state is about to be saved. Throws to prevent it.
  virtual void before_save(Trainer& /*trainer*/) {}
  /// A reason to put a save off until a later step, which follows "step N isn't saved: "; "": none. The last
  /// step is saved in any case.
  virtual std::string why_not_save() const { return ""; }

  // ---- what is logged and saved

  virtual void add_metrics(StepMetrics& /*metrics*/) const {}
  /// State for checkpoints, as JSON; "": there is none. load() gets what state() gave, unless a checkpoint
  /// lacks it.
  virtual std::string state() const { return ""; }
  virtual void load(const std::string& /*state*/) {}
};

struct NamedPolicy {
  std::string name;  ///< key of its state in a checkpoint's train_state
  std::unique_ptr<TrainerPolicy> policy;
};
using TrainerPolicies = std::vector<NamedPolicy>;

/// Makes a policy of yours for a trainer of these parts, which live as long as the policy; null: not for this
/// run. They follow the built-in policies, in the order of their names.
using MakePolicy = std::function<std::unique_ptr<TrainerPolicy>(TrainerParts& parts)>;
Registry<MakePolicy>& trainer_policies();

}  // namespace titan::train
