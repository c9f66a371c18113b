#include "titan/train/validation.h"

#include <chrono>

#include <c10/core/GradMode.h>
#include <torch/nn/module.h>

#include "core/units.h"
#include "titan/core/error.h"
#include "titan/train/stop_agreement.h"

namespace titan::train {

void describe(config::Table<ValidationSettings>& table) {
  table.field("enable", &ValidationSettings::enable, "validate at step 1 and every freq steps");
  table.field("dataset", &ValidationSettings::dataset, "data source; see docs/data.md");
  table.field("dataset_path", &ValidationSettings::dataset_path,
              "file, folder or glob that the source reads");
  table.field("local_batch_size", &ValidationSettings::local_batch_size,
              "sequences per data-parallel rank and micro-batch", config::at_least(1));
  table.field(
      "global_batch_size", &ValidationSettings::global_batch_size,
      "sequences of a batch of all ranks, whatever their number: with `steps`, what is validated then "
      "doesn't depend on it; -1: local_batch_size x data-parallel ranks",
      config::positive_or_minus_one());
  table.field("seq_len", &ValidationSettings::seq_len, "tokens per sequence, at most training.seq_len",
              config::at_least(1));
  table.field("freq", &ValidationSettings::freq, "steps from one validation to the next",
              config::at_least(1));
  table.field("steps", &ValidationSettings::steps, "batches of a validation; -1: the whole set once",
              config::positive_or_minus_one());
  table.table("dataloader", &ValidationSettings::dataloader);
}

namespace {

/// Evaluation mode for a scope, on every exit.
class EvaluationMode {
 public:
  explicit EvaluationMode(const std::vector<Stage>& stages) : stages_(stages) { set_training(false); }
  ~EvaluationMode() { set_training(true); }

 private:
  void set_training(bool training) const {
    for (const Stage& stage : stages_) stage.model->root().module().train(training);
  }
  const std::vector<Stage>& stages_;
  c10::NoGradGuard no_grad_;
};

}  // namespace

ValidationResult validate(StepRunner& runner, const StepPlan& plan, const Meshes& meshes,
                          const ValidationBatches& batches, int64_t max_batches) {
  EvaluationMode evaluation(runner.stages());
  const auto start = std::chrono::steady_clock::now();
  ValidationResult result;
  double local_loss_sum = 0;
  int64_t num_empty = 0;
  for (int64_t i = 0; i != max_batches; ++i) {
    if (i % batches.micro_batches == 0) num_empty = 0;
    auto batch = batches.next();
    if (!batch) break;
    TokenCounts counts =
        batches.stop ? batches.stop->count({*batch}) : count_valid_tokens({*batch}, meshes.batch);
    if (batches.stop && batches.stop->agreed()) {
      result.stopped = true;
      return result;
    }
    if (counts.global == 0) {
      if (batches.run_dry && ++num_empty == batches.micro_batches) break;
      continue;
    }
    const auto micro_batches = split_rows({*batch}, batch->input_BS.size(0) / plan.num_micro_batches());
    at::Tensor share = runner.run(plan, micro_batches, counts.global);
    local_loss_sum += share.item<double>() * static_cast<double>(counts.global);
    result.tokens += counts.global;
    result.local_tokens += batch->labels_BS.numel();
  }
  if (result.tokens == 0)
    throw ConfigError("the validation set holds no token to predict; see validation.dataset");
  double loss_sum = meshes.loss.group()->sum(local_loss_sum, {"train::validate"});
  result.loss = loss_sum / static_cast<double>(result.tokens);
  result.seconds = seconds_since(start);
  return result;
}

}  // namespace titan::train
