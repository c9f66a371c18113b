#pragma once

// [Note: policies]
// The trainer's loop computes, saves and resumes. Everything else that decides about a run is a policy:
// whether a step that went wrong is skipped, when the run stops early or goes back to a checkpoint, what is
// compared or validated between steps. The loop calls its policies in their order, at fixed places of a step;
// a policy overrides the two or three hooks that it needs. Every rank has the same policies, and each hook is
// called by the training thread of every rank, so a hook may be collective. Apart from vote(), a hook must
// return the same result on all ranks.
//
// Your own policy, in your program or in a shared object (experimental.custom_import):
//
//   struct StopWhenGood : titan::train::TrainerPolicy {
//     bool reads_loss() const override { return true; }
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

/// A rank's part in the sums of a step that is logged.
struct RankTokens {
  int64_t rows = -1;  ///< its position among the ranks with different rows; -1: another rank counts its loss
  int64_t valid = 0;  ///< valid labels in its rows
  int64_t seen = 0;   ///< tokens of the run so far in its rows; 0: another rank counts them
};

/// Number of a step's valid labels: those that aren't -100.
struct TokenCounts {
  int64_t local = 0;                   ///< in this rank's rows, over its micro-batches
  int64_t global = 0;                  ///< in the rows of all ranks
  std::vector<RankTokens> ranks = {};  ///< empty unless the step is logged
};

/// A step's input: enough to run it again.
struct StepInput {
  std::vector<data::Batch> batches;
  TokenCounts tokens;
};

/// A step's results on the host.
struct StepValues {
  int64_t step = 0;
  double local_loss = 0;  ///< this rank's part of the loss
  /// Those of all ranks; empty unless the step is logged or a policy `reads_loss()`.
  std::vector<double> losses = {};
  int loss_rank = -1;  ///< lowest rank with a non-finite loss; -1: none
  optim::GradNorm grad_norm;
  bool finite() const { return loss_rank < 0 && grad_norm.finite(); }
};

/// A step whose loss or gradient norm isn't finite.
struct NonFiniteStep {
  StepValues values;
  StepInput input;
  std::string problem;  ///< "step 7: the loss isn't finite on rank 3"
};

/// Go: this rank is ready for the next step. Stop: the run should save its state and end before that step.
/// Fail: a checkpoint has failed on this rank.
enum class Vote : uint8_t { Go, Stop, Fail };

class TrainerPolicy {
 public:
  virtual ~TrainerPolicy() = default;

  // ---- whether to continue

  /// This rank's vote, which is exchanged with the token counts at the beginning of every step and every
  /// validation batch. One Stop ends the run before that step, after saving the whole state.
  virtual Vote vote() { return Vote::Go; }
  /// Called every 0.1 s while this rank waits for data. True: the rank stops waiting, and vote() must return
  /// Stop from then on.
  virtual bool gives_up_waiting() { return false; }
  /// Why the run stops, if this policy stopped it. Called once all ranks have agreed to stop.
  virtual std::optional<StopCause> stop_cause() { return std::nullopt; }
  /// The run stops: nothing that this policy prepares will be used.
  virtual void stopped() {}

  // ---- a step's numbers: called at the end of the step, or one step later if they are read late

  /// Whether judge() calls Trainer::loss_of_all: the ranks' losses then come with each step's numbers.
  virtual bool reads_loss() const { return false; }
  /// Called if the loss and the gradient norm are finite.
  virtual void judge(Trainer& /*trainer*/, const StepValues& /*values*/) {}
  /// Called if they aren't; `problem` says which one. The weights are those from before the step. True: the
  /// run continues with the next batch. False leaves the decision to the other policies; if none skips the
  /// step, the run ends with an UnsoundRun. Throws UnsoundRun to end it at once; `explain` returns what all
  /// policies find out about the cause.
  virtual bool skip(const std::string& /*problem*/, const std::function<std::string()>& /*explain*/) {
    return false;
  }
  /// Finds the source of the non-finite numbers, for the error message. The run ends afterwards.
  virtual std::string explain(Trainer& /*trainer*/, const NonFiniteStep& /*step*/) { return ""; }

  // ---- state that changes

  /// Called before the optimizer changes the weights, once no save reads the state. Gradients are clipped by now on a
  /// CPU; on a GPU the optimizer clips them while it updates.
  virtual void before_update() {}
  /// Called at the end of a step. True: the trainer's state is no longer that of this step
  /// (Trainer::load_before), so later policies aren't called and the step isn't saved.
  virtual bool end_step(Trainer& /*trainer*/) { return false; }
  /// Called before the state is saved. Throws to prevent the save.
  virtual void before_save(Trainer& /*trainer*/) {}
  /// A reason to postpone the save to a later step, logged after "step N isn't saved: "; "": none. The last
  /// step is always saved.
  virtual std::string why_not_save() const { return ""; }

  // ---- what is logged and saved

  virtual void add_metrics(StepMetrics& /*metrics*/) const {}
  /// State for checkpoints, as JSON; "": none. load() gets the text that state() returned; it isn't called
  /// for a checkpoint without one.
  virtual std::string state() const { return ""; }
  virtual void load(const std::string& /*state*/) {}
};

struct NamedPolicy {
  std::string name;  ///< key of its state in a checkpoint's train_state
  std::unique_ptr<TrainerPolicy> policy;
};
using TrainerPolicies = std::vector<NamedPolicy>;

/// Makes your policy for a trainer with these parts, which live as long as the policy; null: not in this run.
/// Your policies follow the built-in ones, in the order of their names.
using MakePolicy = std::function<std::unique_ptr<TrainerPolicy>(TrainerParts& parts)>;
Registry<MakePolicy>& trainer_policies();

}  // namespace titan::train
